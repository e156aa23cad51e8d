"""Pausing, sleeping, draining: what reaches the engine core, in which order, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fake_engine import FakeEngine, open_fake_llm
from trioserve import SamplingParams
from trioserve.errors import ClosedError, EngineDeadError, InvalidRequestError
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock


async def test_every_method_is_a_call_of_the_core(fake: FakeEngine) -> None:
    llm = fake.llm
    fake.client.answers["is_sleeping"] = False
    assert await llm.reset_prefix_cache() is True
    assert await llm.reset_prefix_cache(reset_running_requests=True) is True
    await llm.pause_generation()
    await llm.pause_generation("keep", clear_cache=False)
    assert await llm.is_paused() is True
    await llm.resume_generation()
    await llm.sleep()
    await llm.sleep(2, "wait")
    assert await llm.is_sleeping() is False
    await llm.wake_up()
    await llm.wake_up(["weights", "kv_cache"])
    await llm.wait_for_requests_to_drain()
    assert fake.client.calls == [
        ("reset_prefix_cache", False),
        ("reset_prefix_cache", True),
        ("pause", "abort", True),
        ("pause", "keep", False),
        ("is_paused",),
        ("resume",),
        ("sleep", 1, "abort"),
        ("sleep", 2, "wait"),
        ("is_sleeping",),
        ("wake_up", None),
        ("wake_up", ["weights", "kv_cache"]),
        ("drain",),
    ]


@pytest.mark.parametrize("method", ["pause_generation", "sleep"])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_only_abort_ends_the_requests_under_way(fake: FakeEngine, method: str, mode: Any) -> None:
    params = SamplingParams(n=2)
    async with fake.llm.stream("x", params) as first, fake.llm.stream("y") as second:
        await getattr(fake.llm, method)(mode=mode)
        if mode == "abort":
            for outputs in (first, second):
                output = await anext(outputs)
                assert output.finished
                assert {c.finish_reason for c in output.outputs} == {FinishReason.ABORT}
            assert sorted(fake.client.aborted) == [add.request_id for add in fake.client.added]
        else:
            assert fake.client.aborted == []


@pytest.mark.parametrize(
    ("method", "arguments", "parameter"),
    [
        ("pause_generation", {"mode": "now"}, "mode"),
        ("pause_generation", {"clear_cache": 1}, "clear_cache"),
        ("sleep", {"level": 3}, "level"),
        ("sleep", {"level": True}, "level"),
        ("sleep", {"mode": "now"}, "mode"),
        ("wake_up", {"tags": ["weights", "coffee"]}, "tags"),
        ("wake_up", {"tags": "coffee"}, "tags"),
        ("reset_prefix_cache", {"reset_running_requests": "yes"}, "reset_running_requests"),
        ("wait_for_requests_to_drain", {"drain_timeout": -1}, "drain_timeout"),
        ("wait_for_requests_to_drain", {"drain_timeout": float("nan")}, "drain_timeout"),
        ("wait_for_requests_to_drain", {"drain_timeout": 10**400}, "drain_timeout"),
        ("wait_for_requests_to_drain", {"drain_timeout": True}, "drain_timeout"),
        ("wait_for_requests_to_drain", {"drain_timeout": "5"}, "drain_timeout"),
        ("sleep", {"level": 10**5000}, "level"),
        ("wake_up", {"tags": 5}, "tags"),
    ],
)
async def test_wrong_arguments_are_named_and_do_nothing(
    fake: FakeEngine, method: str, arguments: dict[str, Any], parameter: str
) -> None:
    async with fake.llm.stream("x"):
        with pytest.raises(InvalidRequestError, match=f"{parameter} must be") as caught:
            await getattr(fake.llm, method)(**arguments)
        assert caught.value.parameter == parameter
        assert fake.client.calls == fake.client.aborted == []


async def test_draining_takes_as_long_as_it_may(fake: FakeEngine, autojump_clock: MockClock) -> None:
    fake.client.answers["drain"] = drained = trio.Event()
    with pytest.raises(TimeoutError, match=r"after 2\.5 seconds"):
        await fake.llm.wait_for_requests_to_drain(2.5)
    assert trio.current_time() == 2.5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.llm.wait_for_requests_to_drain)
        await wait_all_tasks_blocked()
        drained.set()


async def test_a_deadline_of_the_callers_own_is_no_timeout(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    fake.client.answers["drain"] = trio.Event()
    with trio.move_on_after(1) as scope:
        await fake.llm.wait_for_requests_to_drain(2)
    assert scope.cancelled_caught


async def test_a_dead_engine_and_a_closed_one_cannot_be_steered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_llm(tmp_path, monkeypatch) as fake:
        fake.client.die()
        await wait_all_tasks_blocked()
        with pytest.raises(EngineDeadError):
            await fake.llm.pause_generation()
    for call in (fake.llm.pause_generation, fake.llm.is_sleeping, fake.llm.wake_up):
        with pytest.raises((EngineDeadError, ClosedError)):
            await call()
