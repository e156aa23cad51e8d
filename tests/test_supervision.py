"""An engine core's death and what follows, in every state, with cores that do what the test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from fake_engine import STATS, FakeEngineClient, open_fake_llm
from hash_engine import open_hash_llm
from trioserve.async_llm import AsyncLLM
from trioserve.core.step_result import StepResult
from trioserve.errors import ClosedError, EngineDeadError, EngineRestartingError, EngineStartError
from trioserve.frontend.prompts import TokensPrompt
from trioserve.link.columns import pack_step
from trioserve.link.watchdog import wait_for_silence
from trioserve.llm_engine import LLMEngine
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trioserve.link.client import EngineCoreClient

START = 20.0
"""Seconds that a core takes to be ready."""
BACKOFF = 4.0


class Core(FakeEngineClient):
    def __init__(self) -> None:
        super().__init__()
        self.reaped = trio.Event()
        self.reaped.set()
        self.send = self._send.send_nowait

    async def reap(self) -> str | None:
        await self.reaped.wait()
        return await super().reap()


@attrs.define(eq=False)
class Cores:
    """The engine cores that were started, and what the next starts do."""

    start_seconds: float = START
    ready: list[Core] = attrs.Factory(list)
    failures: deque[EngineStartError] = attrs.Factory(deque)
    """Of the next starts, in place of a core."""
    on_ready: Callable[[Core], None] = lambda _: None
    started_at: list[float] = attrs.Factory(list)
    num_open: int = 0
    """Whose scope is open."""

    @asynccontextmanager
    async def open(self, *_: object) -> AsyncIterator[Core]:
        self.started_at.append(trio.current_time())
        self.num_open += 1
        try:
            await trio.sleep(self.start_seconds)
            if self.failures:
                raise self.failures.popleft()
            core = Core()
            self.ready.append(core)
            self.on_ready(core)
            yield core
        finally:
            self.num_open -= 1

    @property
    def newest(self) -> Core:
        return self.ready[-1]

    @property
    def delays(self) -> list[float]:
        """Between the starts, without what they take themselves."""
        return [after - before - self.start_seconds for before, after in pairwise(self.started_at)]


async def until(is_true: Callable[[], bool]) -> None:
    """Without letting the clock go on."""
    while not is_true():
        await trio.lowlevel.checkpoint()


@attrs.frozen
class Supervised:
    llm: AsyncLLM
    cores: Cores

    def metric(self, name: str) -> float:
        lines = self.llm.metrics.render().decode().splitlines()
        (line,) = [line for line in lines if line.startswith(f"trioserve:{name}{{")]
        return float(line.rsplit(" ", 1)[1])

    async def lose_core(self) -> None:
        """And return while it is being restarted, at the very time of the death."""
        self.cores.newest.die()
        await until(lambda: not self.llm.is_running and self.metric("engine_deaths_total") > 0)
        for _ in range(10):
            await trio.lowlevel.checkpoint()


Open = "Callable[..., AbstractAsyncContextManager[Supervised]]"


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """An AsyncLLM that is restarted. Its cores' scopes end with it."""

    @asynccontextmanager
    async def open_supervised(cores: Cores | None = None, **args: Any) -> AsyncIterator[Supervised]:
        cores = cores or Cores()
        args = {"engine_restart": "on-failure", "engine_restart_backoff": BACKOFF, **args}
        async with open_fake_llm(tmp_path, monkeypatch, open_core=cores.open, **args) as fake:
            yield Supervised(fake.llm, cores)
        assert cores.num_open == 0

    return open_supervised


@asynccontextmanager
async def failing_with(kind: type[Exception], llm: AsyncLLM, *prompts: str) -> AsyncIterator[list[str]]:
    """Requests that wait for their first token inside, and have failed with such an error afterwards."""
    texts: list[str] = []

    async def consume(prompt: str) -> None:
        with pytest.raises(kind) as caught:
            await llm.complete(prompt)
        texts.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(consume, prompt)
        await until(lambda: llm.num_open_requests == len(prompts))
        yield texts


# Never


async def test_never_restarted_it_is_dead_for_good_and_the_text_says_how_it_ended(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(engine_restart="never") as it:
        it.cores.newest.ending = "signal SIGKILL"
        async with failing_with(EngineDeadError, it.llm, "x", "y") as texts:
            it.cores.newest.die("The engine core ended unexpectedly.")
        assert texts == ["The engine core ended unexpectedly. (signal SIGKILL)"] * 2
        assert str(await it.llm.wait_dead()) == texts[0]
        assert it.llm.errored
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await it.llm.complete("z")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await it.llm.wait_ready()
        assert it.metric("engine_up") == 0
        await wait_all_tasks_blocked()
        assert it.cores.num_open == 0
        assert len(it.cores.started_at) == 1


async def test_while_it_dies_it_is_not_to_be_had_and_not_said_to_be_restarted(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(engine_restart="never") as it:
        it.cores.newest.reaped = trio.Event()
        it.cores.newest.die()
        await wait_all_tasks_blocked()
        assert it.llm.errored
        with pytest.raises(EngineDeadError):
            await it.llm.complete("x")
        it.cores.newest.reaped.set()
        await it.llm.wait_dead()


# On failure


async def test_requests_under_way_fail_and_new_ones_are_told_when_to_come_again(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised() as it:
        async with failing_with(EngineDeadError, it.llm, "x", "y"):
            await it.lose_core()
        assert not it.llm.is_running
        assert not it.llm.errored
        for seconds_left in (BACKOFF + START, BACKOFF + START - 10):
            with pytest.raises(EngineRestartingError) as caught:
                await it.llm.complete("z")
            assert caught.value.retry_after == pytest.approx(seconds_left, abs=1)
            await trio.sleep(10)
        with pytest.raises(EngineRestartingError):
            await it.llm.check_health()
        with pytest.raises(EngineRestartingError):
            it.llm.check_room()
        await it.llm.wait_ready()
        assert it.cores.delays[0] >= BACKOFF
        async with it.llm.stream("again") as outputs:
            it.cores.newest.emit(it.cores.newest.added[0], "a", FinishReason.LENGTH)
            assert (await anext(outputs)).outputs[0].text == "a"
        await it.llm.check_health()


async def test_a_start_that_takes_longer_than_the_last_is_said_to_be_ready_soon(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised() as it:
        it.cores.start_seconds = 1000
        await it.lose_core()
        await trio.sleep(BACKOFF + START + 500)
        with pytest.raises(EngineRestartingError) as caught:
            await it.llm.complete("z")
        assert caught.value.retry_after == 1


async def test_scopes_of_failed_requests_end_cleanly_while_there_is_no_core(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised() as it:
        channel = await it.llm.submit("x")
        async with it.llm.stream("y", request_id="mine") as outputs:
            await it.lose_core()
            it.llm.abort("mine")
            with pytest.raises(EngineDeadError):
                await anext(outputs)
        it.llm.release(channel)
        assert it.llm.num_open_requests == 0
        assert it.cores.newest.aborted == []


async def test_metrics_tell_of_deaths_and_restarts(supervised: Open, autojump_clock: MockClock) -> None:
    async with supervised() as it:
        names = ("engine_up", "engine_deaths_total", "engine_restarts_total", "num_requests_running")
        assert [it.metric(name) for name in names] == [1, 0, 0, 0]
        running = StepResult.failure(99)
        it.cores.newest.send(pack_step(running, attrs.evolve(STATS, num_running=3)))
        await wait_all_tasks_blocked()
        assert [it.metric(name) for name in names] == [1, 0, 0, 3]
        await it.lose_core()
        assert [it.metric(name) for name in names] == [0, 1, 0, 0]
        await it.llm.wait_ready()
        assert [it.metric(name) for name in names] == [1, 1, 1, 0]


async def test_a_core_is_empty_when_it_starts_so_a_pause_is_over(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised() as it:
        await it.llm.pause_generation("keep")
        await it.lose_core()
        with pytest.raises(EngineRestartingError):
            await it.llm.resume_generation()
        await it.llm.wait_ready()
        assert it.cores.newest.calls == []


async def test_a_call_that_waits_when_the_core_dies_hears_of_it(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised() as it:
        it.cores.newest.emit_nonsense()
        it.cores.newest.die("and dead, too")
        await it.llm.wait_ready()  # it serves still, as far as anybody knows
        await until(lambda: not it.llm.is_running)
        await it.llm.wait_ready()
        assert it.metric("engine_deaths_total") == 1, "one death, however many signs of it"


# Again and again


def dies_at_once(core: Core) -> None:
    core.die("it always dies")


async def test_each_restart_in_a_row_waits_twice_as_long_up_to_a_minute(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(engine_restart_limit=6) as it:
        it.cores.on_ready = dies_at_once
        it.cores.newest.die("the first death")
        assert str(await it.llm.wait_dead()) == "it always dies"
        assert it.cores.delays == pytest.approx([4, 8, 16, 32, 60, 60])
        with pytest.raises(EngineDeadError):
            await it.llm.complete("x")


async def test_no_number_of_restarts_is_too_large_for_the_arithmetic(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(engine_restart_limit=1100, engine_restart_backoff=1e-9) as it:
        it.cores.on_ready = dies_at_once
        it.cores.newest.die()
        await it.llm.wait_dead()
        assert len(it.cores.started_at) == 1101


async def test_a_start_that_fails_counts_and_its_reason_is_told_in_the_end(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(engine_restart_limit=2) as it:
        it.cores.failures.extend(EngineStartError(f"no memory, number {n}") for n in (1, 2))
        it.cores.newest.die()
        assert str(await it.llm.wait_dead()).endswith("could not be restarted: no memory, number 2")
        assert it.cores.delays == pytest.approx([4, 8])
        assert it.metric("engine_deaths_total") == 3


async def test_after_a_start_that_failed_the_next_one_may_succeed(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(engine_restart_limit=2) as it:
        it.cores.failures.append(EngineStartError("no memory"))
        await it.lose_core()
        await it.llm.wait_ready()
        assert it.metric("engine_restarts_total") == 1
        await it.llm.check_health()


async def test_good_service_ends_the_row(supervised: Open, autojump_clock: MockClock) -> None:
    async with supervised(engine_restart_limit=1) as it:
        for _ in range(3):
            await trio.sleep(601)
            await it.lose_core()
            await it.llm.wait_ready()
        await trio.sleep(599)
        it.cores.newest.die("too early")
        assert str(await it.llm.wait_dead()) == "too early"
        assert it.cores.delays[-1] == pytest.approx(601 + BACKOFF)


async def test_the_first_start_is_not_tried_again(supervised: Open, autojump_clock: MockClock) -> None:
    cores = Cores(failures=deque([EngineStartError("no such thing")]))
    with pytest.raises(EngineStartError, match="no such thing"):
        async with supervised(cores):
            raise AssertionError("it cannot start")
    assert len(cores.started_at) == 1
    assert cores.num_open == 0


# Requests that are given to the next core


async def test_requeued_requests_go_on_in_the_next_core_and_others_fail(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(requeue_on_restart=True) as it:
        first = it.cores.newest
        texts: list[str] = []

        async def wait() -> None:
            output = await it.llm.complete("waits", SamplingParams(max_tokens=1, seed=7))
            texts.append(output.outputs[0].text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await until(lambda: len(first.added) == 1)
            async with it.llm.stream("begun") as outputs:
                first.emit(first.added[1], "b")
                assert (await anext(outputs)).outputs[0].text == "b"
                it.cores.failures.append(EngineStartError("no memory"))
                await it.lose_core()
                with pytest.raises(EngineDeadError):
                    await anext(outputs)
            await it.llm.wait_ready()
            (again,) = it.cores.newest.added
            assert again.prompt_token_ids == first.added[0].prompt_token_ids
            assert again.seed == first.added[0].seed
            it.cores.newest.emit(again, "a", FinishReason.LENGTH)
        assert texts == ["a"]


async def test_leaving_a_requeued_request_leaves_nothing_for_the_next_core(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(requeue_on_restart=True) as it:
        channel = await it.llm.submit("x")
        await it.lose_core()
        it.llm.release(channel)
        await it.llm.wait_ready()
        assert it.cores.newest.added == []


async def test_requeued_requests_fail_when_there_is_no_next_core(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(requeue_on_restart=True, engine_restart_limit=1) as it:
        async with failing_with(EngineDeadError, it.llm, "x", "y") as texts:
            it.cores.failures.append(EngineStartError("no memory"))
            it.cores.newest.die()
        assert [text.rsplit(": ", 1)[1] for text in texts] == ["no memory"] * 2


# Leaving, in every state


async def serving(it: Supervised) -> None:
    await it.llm.check_health()


async def dying(it: Supervised) -> None:
    it.cores.newest.reaped = trio.Event()
    it.cores.newest.die()
    await until(lambda: not it.llm.is_running)


async def waiting_to_start(it: Supervised) -> None:
    await it.lose_core()


async def starting(it: Supervised) -> None:
    await it.lose_core()
    await trio.sleep(BACKOFF + 1)
    assert it.cores.num_open == 1


STATES = [serving, dying, waiting_to_start, starting]


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("reach", STATES)
async def test_closing_waits_for_nothing(
    supervised: Open, autojump_clock: MockClock, reach: Any, requeue: bool
) -> None:
    async with supervised(requeue_on_restart=requeue, strict=False) as it:
        channel = await it.llm.submit("x")
        await reach(it)
        now = trio.current_time()
    assert trio.current_time() == now
    assert not it.llm.is_running
    assert it.llm.errored == (reach is not serving)
    with pytest.raises((ClosedError, EngineDeadError)):
        await channel.take()
    with pytest.raises(ClosedError if reach is serving else EngineDeadError):
        await it.llm.wait_ready()
    it.llm.release(channel)


@pytest.mark.parametrize("reach", STATES)
async def test_a_cancellation_from_outside_ends_everything(
    supervised: Open, autojump_clock: MockClock, reach: Any
) -> None:
    with trio.CancelScope() as scope:
        async with supervised(strict=False) as it, it.llm.stream("x"):
            await reach(it)
            now = trio.current_time()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == now
    assert it.cores.num_open == 0
    assert it.llm.num_open_requests == 0


@attrs.define(eq=False)
class CancelAtStep(trio.abc.Instrument):
    """Cancels before step `number` of all tasks of this loop together."""

    scope: trio.CancelScope
    number: int
    cancelled_at: float | None = None

    def before_task_step(self, _: trio.lowlevel.Task) -> None:
        self.number -= 1
        if not self.number:
            self.scope.cancel()
            self.cancelled_at = trio.current_time()


async def live_through_two_deaths(it: Supervised) -> None:
    """A request is requeued, waits through a start that fails, and is answered by the third core."""
    async with it.llm.stream("x", SamplingParams(max_tokens=1)) as outputs:
        it.cores.failures.append(EngineStartError("no memory"))
        it.cores.newest.die()
        await until(lambda: not it.llm.is_running)
        await it.llm.wait_ready()
        it.cores.newest.emit(it.cores.newest.added[0], "a", FinishReason.LENGTH)
        assert (await anext(outputs)).finished
        it.cores.newest.die()
        await until(lambda: not it.llm.is_running)
    await it.llm.wait_ready()


async def test_a_cancellation_at_any_step_of_any_task_ends_everything(
    supervised: Open, autojump_clock: MockClock
) -> None:
    num_cancelled = 0
    while True:
        cores = Cores()
        scope = trio.CancelScope()
        instrument = CancelAtStep(scope, num_cancelled + 1)
        llm = None
        trio.lowlevel.add_instrument(instrument)
        try:
            with scope:
                async with supervised(cores, requeue_on_restart=True, strict=False) as it:
                    llm = it.llm
                    await live_through_two_deaths(it)
        finally:
            trio.lowlevel.remove_instrument(instrument)
        assert cores.num_open == 0
        if llm is not None:
            assert llm.num_open_requests == llm._outputs.admission.num_open == llm._outputs.num_unfreed == 0
            with pytest.raises((ClosedError, EngineDeadError)):
                await llm.wait_ready()
        if instrument.cancelled_at is None:
            break
        assert trio.current_time() == instrument.cancelled_at
        num_cancelled += 1
    assert num_cancelled > 50


async def test_a_death_is_logged_even_if_everything_ends_meanwhile(
    supervised: Open, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised() as it:
        await dying(it)
    assert it.llm.errored
    assert "killed by the test" in caplog.text


async def test_who_waits_for_the_next_core_hears_of_the_end(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async def wait(it: Supervised) -> None:
        with pytest.raises(EngineDeadError):
            await it.llm.wait_ready()

    async with trio.open_nursery() as nursery, supervised() as it:
        await it.lose_core()
        nursery.start_soon(wait, it)
        for _ in range(3):
            await trio.lowlevel.checkpoint()


async def test_a_death_that_only_closing_finds_counts(supervised: Open, autojump_clock: MockClock) -> None:
    async with supervised() as it:
        it.cores.newest.ended_by_itself = "signal SIGSEGV"
    assert it.llm.errored
    assert "SIGSEGV" in str(it.llm.dead_error)


# A core that does not answer


async def test_a_core_that_does_not_answer_is_dead_and_one_that_works_long_is_not(
    supervised: Open, autojump_clock: MockClock
) -> None:
    async with supervised(step_timeout=50) as it:
        await trio.sleep(500)
        assert len(it.cores.ready) == 1
        it.cores.newest.answers["ping"] = trio.Event()
        began = trio.current_time()
        async with failing_with(EngineDeadError, it.llm, "x") as texts:
            pass
        assert "--step-timeout" in texts[0]
        assert 50 <= trio.current_time() - began <= 65
        await it.llm.wait_ready()
        await it.llm.check_health()


async def test_a_core_that_answers_late_again_and_again_is_alive(autojump_clock: MockClock) -> None:
    class Slow(FakeEngineClient):
        async def call(self, method: str, *args: Any) -> Any:
            await trio.sleep(25)  # longer than a slice of the patience
            return await super().call(method, *args)

    client = Slow()
    with trio.move_on_after(1000) as scope:
        await wait_for_silence(cast("EngineCoreClient", client), 50)
    assert scope.cancelled_caught
    assert len(client.calls) > 20


async def test_what_this_process_slept_through_is_not_the_cores_silence() -> None:
    """A stopped process finds the answer in its socket when it goes on, and all deadlines passed."""
    clock = MockClock()
    is_silent = trio.Event()
    client = FakeEngineClient()
    client.answers["ping"] = answer = trio.Event()

    async def watch() -> None:
        await wait_for_silence(cast("EngineCoreClient", client), 50)
        is_silent.set()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await wait_all_tasks_blocked()
            clock.jump(5)
            await wait_all_tasks_blocked()
            assert client.calls, "a ping is under way"
            clock.jump(10_000)
            answer.set()
            await wait_all_tasks_blocked()
            client.answers.clear()
            for _ in range(20):
                clock.jump(10_000)
                await wait_all_tasks_blocked()
            assert not is_silent.is_set()
            nursery.cancel_scope.cancel()

    await main_on(clock, main)


async def main_on(clock: MockClock, main: Any) -> None:
    """Another trio.run, with a clock of its own."""
    await trio.to_thread.run_sync(lambda: trio.run(main, clock=clock))


async def test_a_step_that_was_stopped_with_everything_else_is_not_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MockClock()

    async def main() -> None:
        async with open_hash_llm(tmp_path, monkeypatch, step_timeout=50) as engine:
            async with trio.open_nursery() as nursery:
                with engine.steps_held():
                    nursery.start_soon(engine.llm.complete, TokensPrompt([5]), SamplingParams(max_tokens=2))
                    await until(lambda: engine.runner.begun.acquire(blocking=False))
                    await wait_all_tasks_blocked()
                    clock.jump(10_000)
                    await wait_all_tasks_blocked()
            assert engine.llm.is_running

    await main_on(clock, main)


# Synchronous callers


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cores], LLMEngine]:
    """An LLMEngine that is restarted."""

    def open_offline(cores: Cores) -> LLMEngine:
        @asynccontextmanager
        async def open_llm() -> AsyncIterator[AsyncLLM]:
            args = {"engine_restart": "on-failure", "engine_restart_backoff": 0.05}
            async with open_fake_llm(tmp_path, monkeypatch, open_core=cores.open, **args) as fake:
                yield fake.llm

        return LLMEngine(cast("AsyncLLM", open_llm()))

    return open_offline


def test_offline_a_death_is_one_error_for_all_that_died_with_it(
    offline: Callable[[Cores], LLMEngine],
) -> None:
    def dies_at_the_third(core: Core) -> None:
        add = core.add

        def add_and_die(request: Any) -> None:
            add(request)
            if len(core.added) == 3:
                core.die("killed")

        core.add = add_and_die  # type: ignore[method-assign]

    with offline(Cores(start_seconds=0.05, on_ready=dies_at_the_third)) as engine:
        for name in "abc":
            engine.add_request(name, "x", SamplingParams(max_tokens=5))
        with pytest.raises(EngineDeadError, match="killed"):
            engine.step()
        assert not engine.has_unfinished_requests()
        assert engine.step() == []


def test_offline_the_next_call_waits_for_the_next_core(offline: Callable[[Cores], LLMEngine]) -> None:
    cores = Cores(start_seconds=0.05)

    def answers(core: Core) -> None:
        add = core.add

        def add_and_answer(request: Any) -> None:
            add(request)
            if len(cores.ready) == 1:
                core.die("killed")
            else:
                core.emit(request, "answer", FinishReason.LENGTH)

        core.add = add_and_answer  # type: ignore[method-assign]

    cores.on_ready = answers
    with offline(cores) as engine:
        engine.add_request("a", "x", SamplingParams(max_tokens=5))
        with pytest.raises(EngineDeadError, match="killed"):
            engine.step()
        assert not engine.has_unfinished_requests()
        engine.add_request("b", "y", SamplingParams(max_tokens=5))
        (output,) = engine.step()
        assert output.outputs[0].text == "answer"
        assert engine.reset_prefix_cache()
        assert len(cores.ready) == 2
