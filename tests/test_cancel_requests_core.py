"""Every kind of request, cancelled at every checkpoint, over the real engine core in this process.

Its model is a hash function, so that each token tells whether blocks were mixed up.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from cancel_controls import CONTROLS, DONE, Control, ControlledWorld
from cancel_everywhere import BETWEEN, RESUMING, WAITING, cancel_everywhere
from cancel_http import HTTP, HttpKind, open_site
from cancel_kinds import LIBRARY, Kind
from cancel_report import tell
from cancel_worlds import CoreWorld, open_hash_llm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Record = Callable[[str, object], None]

ENGINE = "core, in process"

# The hash function gives each token alone, and neither alternatives nor grammars.
_BEYOND = ("beam search", "structured", "logprobs")


def within_reach(kind: Kind | HttpKind) -> bool:
    return not any(word in kind.name for word in _BEYOND)


@pytest.mark.parametrize("kind", [*filter(within_reach, LIBRARY)], ids=lambda kind: kind.name)
async def test_in_a_library(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    async with open_hash_llm(tmp_path, monkeypatch) as llm:
        world = CoreWorld(llm, is_process=False)
        expected = await kind.expected(world)
        # Left to the garbage collector, 50 runs take seconds.
        moments = (WAITING, RESUMING) if "abandoned" in kind.name else (WAITING, RESUMING, BETWEEN)
        found = await cancel_everywhere(kind.name, world, partial(kind.run, world), expected, moments=moments)
        tell(record_property, ENGINE, found)
        assert await llm.reset_prefix_cache(), "a block is held"


@pytest.mark.parametrize("kind", [*filter(within_reach, HTTP)], ids=lambda kind: kind.name)
async def test_over_http(
    kind: HttpKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    async with open_hash_llm(tmp_path, monkeypatch) as llm:
        world = CoreWorld(llm, is_process=False)
        expected = await kind.expected(world)
        moments = (WAITING, RESUMING) if kind.body.get("stream") else (WAITING, RESUMING, BETWEEN)
        async with open_site(world.llm) as site:
            ask = partial(site.ask, kind)
            tell(
                record_property,
                ENGINE,
                await cancel_everywhere(f"HTTP: {kind.name}", world, ask, expected, moments=moments),
            )
        assert await llm.reset_prefix_cache(), "a block is held"


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
async def test_controls(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    async with open_hash_llm(tmp_path, monkeypatch) as llm:
        world = ControlledWorld(llm, is_process=False)
        run = partial(control.run, world)
        tell(record_property, ENGINE, await cancel_everywhere(f"control: {control.name}", world, run, DONE))
        assert await llm.reset_prefix_cache(), "a block is held"


async def test_waking_up_right_after_giving_up_a_sleep_wakes_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_hash_llm(tmp_path, monkeypatch) as llm:
        for _ in range(30):
            with trio.CancelScope() as scope:
                scope.cancel()
                await llm.sleep(2, "abort")
            await llm.wake_up()
            assert not await llm.is_sleeping()
