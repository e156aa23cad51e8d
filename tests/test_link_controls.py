"""Hold, sleep, wake, forget, drain: an engine core whose step loop is in the test's hand."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_core import Driver
from trioserve.link.controls import Controls
from trioserve.link.step_thread import StepThread


class MemoryRunner:
    """Has weights and a cache, or not."""

    def __init__(self) -> None:
        self.resident = {"weights", "kv_cache"}
        self.loads = 0

    def free_kv_cache(self) -> None:
        self.resident.remove("kv_cache")

    def free_weights(self) -> None:
        self.resident.remove("weights")

    def load_weights(self) -> None:
        self.loads += 1
        self.resident.add("weights")

    def allocate_kv_cache(self, num_blocks: int) -> None:
        assert num_blocks == 64
        self.resident.add("kv_cache")


class Engine:
    """Controls, and a step that begins and ends when the test says so."""

    def __init__(self, thread: StepThread) -> None:
        self.driver = Driver()
        self.runner = MemoryRunner()
        self.controls = Controls(self.driver.core, thread, self.runner, 64)  # type: ignore[arg-type]
        self.results: list[Any] = []

    def add(self, **params: Any) -> int:
        return self.driver.add([1, 2, 3], ignore_eos=True, **params)

    def end_step(self) -> None:
        self.driver.end()
        self.controls.between_steps.arrive()

    async def call(self, method: str, *args: Any) -> None:
        self.results.append(await self.controls.call(method, args))


@pytest.fixture
async def engine():
    async with StepThread.open() as thread:
        yield Engine(thread)


async def test_who_keeps_is_answered_when_the_step_is_back_and_everything_stays_as_it_is(
    engine: Engine, nursery: trio.Nursery
) -> None:
    request = engine.add(max_tokens=5)
    engine.driver.begin()
    nursery.start_soon(engine.call, "pause", "keep", False)
    await wait_all_tasks_blocked()
    assert engine.results == []
    engine.end_step()
    await wait_all_tasks_blocked()
    assert engine.results == [None]
    assert engine.driver.step() == []
    assert await engine.controls.call("is_paused", [])
    await engine.call("resume")
    engine.driver.drain()
    assert len(engine.driver.tokens[request]) == 5


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_waiting_lets_what_runs_end_and_keeps_the_others_out(
    engine: Engine, nursery: trio.Nursery, mode: str
) -> None:
    running = engine.add(max_tokens=2)
    engine.driver.begin()
    nursery.start_soon(engine.call, "pause", mode, True)
    await wait_all_tasks_blocked()
    late = engine.add(max_tokens=1)
    if mode == "abort":
        engine.driver.abort(running)  # the client sees to that
    for _ in range(2 if mode == "wait" else 1):
        assert engine.results == []
        engine.end_step()
        await wait_all_tasks_blocked()
        engine.driver.begin()
    assert engine.results == [None]
    assert engine.driver.plan is None
    assert engine.driver.live == {late}
    assert engine.driver.kv_cache.statistics().num_named == 0, "clear_cache"
    await engine.call("resume")
    engine.driver.drain()


async def test_a_resume_ends_the_wait_of_a_pause(engine: Engine, nursery: trio.Nursery) -> None:
    engine.add(max_tokens=50)
    engine.driver.step()
    nursery.start_soon(engine.call, "pause", "wait", False)
    await wait_all_tasks_blocked()
    await engine.call("resume")
    await wait_all_tasks_blocked()
    assert engine.results == [None, None]
    assert not await engine.controls.call("is_paused", [])


async def test_waiting_lets_who_was_preempted_end_too(engine: Engine, nursery: trio.Nursery) -> None:
    request = engine.add(max_tokens=3)
    engine.driver.step()
    await engine.call("reset_prefix_cache", True)
    late = engine.add(max_tokens=1)
    nursery.start_soon(engine.call, "pause", "wait", False)
    await wait_all_tasks_blocked()
    for _ in range(2):
        assert engine.results == [True]
        engine.driver.begin()
        engine.end_step()
        await wait_all_tasks_blocked()
    assert engine.results == [True, None]
    assert len(engine.driver.tokens[request]) == 3
    assert engine.driver.live == {late}
    engine.driver.core.release()
    engine.driver.drain()


async def test_nobody_resumes_between_the_last_step_and_sleep(engine: Engine, nursery: trio.Nursery) -> None:
    """However the hold was changed meanwhile, no step runs once the memory is about to go."""
    engine.add(max_tokens=6)
    engine.driver.begin()
    nursery.start_soon(engine.call, "sleep", 1, "keep")
    await wait_all_tasks_blocked()
    for _ in range(2):  # after each step, and before the sleeping task has noticed, others change the hold
        engine.end_step()
        await engine.call("resume")
        engine.driver.begin()
        engine.driver.core.hold(new_only=True)
        await wait_all_tasks_blocked()
    engine.end_step()
    with pytest.raises(ValueError, match="wake_up first"):
        await engine.call("resume")
    engine.driver.begin()
    assert engine.driver.plan is None
    while len(engine.results) < 3:
        await wait_all_tasks_blocked(0.001)
    assert engine.runner.resident == {"weights"}
    await engine.call("wake_up", None)
    engine.driver.drain()


@pytest.mark.parametrize(
    ("level", "resident"), [(0, {"weights", "kv_cache"}), (1, {"weights"}), (2, set[str]())]
)
async def test_sleep_gives_memory_back_and_wake_up_brings_it_again(
    engine: Engine, nursery: trio.Nursery, level: int, resident: set[str]
) -> None:
    request = engine.add(max_tokens=6)
    engine.driver.step()
    engine.driver.begin()
    nursery.start_soon(engine.call, "sleep", level, "keep")
    await wait_all_tasks_blocked()
    assert engine.runner.resident == {"weights", "kv_cache"}, "not while a step runs"
    engine.end_step()
    while not engine.results:
        await wait_all_tasks_blocked(0.001)
    assert engine.runner.resident == resident
    assert engine.controls.sleep_level == level
    assert await engine.controls.call("is_sleeping", [])
    assert engine.driver.step() == []
    assert (engine.driver.num_held_blocks == 0) == (level > 0)

    await engine.call("wake_up", None)
    assert engine.runner.resident == {"weights", "kv_cache"}
    assert engine.runner.loads == (level == 2)
    assert (engine.controls.sleep_level, await engine.controls.call("is_sleeping", [])) == (0, False)
    engine.driver.drain()
    assert len(engine.driver.tokens[request]) == 6


async def test_scheduling_goes_on_only_when_all_memory_is_there(engine: Engine) -> None:
    engine.add(max_tokens=1)
    await engine.call("sleep", 2, "keep")
    with pytest.raises(ValueError, match="wake_up first"):
        await engine.call("resume")
    await engine.call("wake_up", ["scheduling"])
    await engine.call("wake_up", ["weights"])
    assert engine.controls.sleep_level == 1
    assert engine.driver.step() == []
    await engine.call("wake_up", ["kv_cache"])
    assert engine.controls.sleep_level == 0
    engine.driver.drain()


async def test_sleeping_twice_or_deeper_and_waking_twice(engine: Engine) -> None:
    for level, expected in ((1, 1), (1, 1), (2, 2), (1, 2)):
        await engine.call("sleep", level, "wait")
        assert engine.controls.sleep_level == expected
    await engine.call("wake_up", None)
    await engine.call("wake_up", None)
    assert engine.runner.loads == 1
    assert not await engine.controls.call("is_paused", [])


async def test_a_reset_with_preemption_happens_between_two_steps(
    engine: Engine, nursery: trio.Nursery
) -> None:
    request = engine.add(max_tokens=4)
    engine.driver.begin()
    assert not await engine.controls.call("reset_prefix_cache", [False])
    nursery.start_soon(engine.call, "reset_prefix_cache", True)
    await wait_all_tasks_blocked()
    engine.end_step()
    engine.driver.begin()  # at once: the reset has happened all the same
    assert [sequence.start for sequence in engine.driver.plan.batch.sequences] == [0]
    await wait_all_tasks_blocked()
    assert engine.results == [True]
    engine.end_step()
    engine.driver.drain()
    assert len(engine.driver.tokens[request]) == 4


async def test_a_call_that_is_cancelled_before_its_turn_changes_nothing(engine: Engine) -> None:
    engine.add(max_tokens=4)
    engine.driver.begin()
    with trio.move_on_after(0):
        await engine.call("reset_prefix_cache", True)
    engine.end_step()
    assert engine.driver.num_held_blocks > 0
    engine.driver.drain()


async def test_drain_waits_for_the_last_request(engine: Engine, nursery: trio.Nursery) -> None:
    engine.add(max_tokens=2)
    nursery.start_soon(engine.call, "drain")
    for _ in range(2):
        await wait_all_tasks_blocked()
        assert engine.results == []
        engine.driver.begin()
        engine.end_step()
    await wait_all_tasks_blocked()
    assert engine.results == [None]


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("dance", [], "there is no method 'dance'"),
        ("pause", ["soon", True], "mode must be abort, wait or keep, got 'soon'"),
        ("sleep", [3, "keep"], "level must be 0, 1 or 2, got 3"),
        ("wake_up", [["weights", "legs"]], "tags must be among weights, kv_cache, scheduling, got 'legs'"),
    ],
)
async def test_wrong_calls_are_the_callers_fault(
    engine: Engine, method: str, args: list[Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await engine.controls.call(method, args)
