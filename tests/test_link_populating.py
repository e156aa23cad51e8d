"""The KV cache gets its memory while nobody waits."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.lowlevel

from trioserve.link.populating import CachePopulation
from trioserve.link.step_thread import StepThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio.testing import MockClock

MIB = 2**20


class Runner:
    bytes_per_block = MIB // 2

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.on_portion: Callable[[], None] = lambda: None

    def populate_kv_cache(self, first_block: int, end_block: int) -> None:
        self.asked.append((first_block, end_block))
        trio.from_thread.run_sync(self.on_portion)


@asynccontextmanager
async def population(num_blocks: int) -> AsyncIterator[tuple[CachePopulation, Any]]:
    async with StepThread.open() as thread:
        runner: Any = Runner()
        yield CachePopulation(thread, runner, num_blocks), runner


@pytest.mark.parametrize(("num_blocks", "portions"), [(20, [(0, 4), (4, 8), (8, 10)]), (1, [])])
async def test_after_some_rest_half_of_the_cache_is_populated_once(
    autojump_clock: MockClock, num_blocks: int, portions: list[tuple[int, int]]
) -> None:
    async with population(num_blocks) as (cache, runner):
        for _ in range(2):
            wanted = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cache.go_on_until, wanted)
                await trio.sleep(5)
                while len(runner.asked) < len(portions):
                    await trio.lowlevel.checkpoint()
                wanted.set()
        assert runner.asked == portions


async def test_who_is_wanted_soon_populates_nothing(autojump_clock: MockClock) -> None:
    async with population(20) as (cache, runner), trio.open_nursery() as nursery:
        wanted = trio.Event()
        nursery.start_soon(cache.go_on_until, wanted)
        await trio.sleep(0.4)
        wanted.set()
    assert runner.asked == []


async def test_who_is_wanted_meanwhile_goes_on_at_the_next_rest(
    autojump_clock: MockClock,
) -> None:
    async with population(20) as (cache, runner):
        wanted = trio.Event()
        runner.on_portion = wanted.set
        await cache.go_on_until(wanted)
        assert runner.asked == [(0, 4)]
        wanted = trio.Event()
        runner.on_portion = wanted.set
        await cache.go_on_until(wanted)
        assert runner.asked == [(0, 4), (4, 8)]


async def test_no_more_than_a_gibibyte_is_populated(autojump_clock: MockClock) -> None:
    async with population(10_000) as (cache, runner):
        wanted = trio.Event()
        runner.on_portion = lambda: wanted.set() if runner.asked[-1][1] == 2048 else None
        await cache.go_on_until(wanted)
        wanted = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.go_on_until, wanted)
            await trio.sleep(5)
            wanted.set()
        assert runner.asked[-1] == (2044, 2048)
