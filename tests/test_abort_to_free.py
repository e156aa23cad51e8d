"""An abort frees its own sequences, within two steps, and is heard of once: in the core and over the link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from fake_engine import STATS, FakeEngine
from hash_engine import HashEngine, open_hash_llm
from hash_model import next_token
from helpers_core import Driver
from trioserve import SamplingParams
from trioserve.core.step_result import StepResult
from trioserve.frontend.prompts import TokensPrompt
from trioserve.link import step_parts
from trioserve.link.columns import pack_step, unpack_freed
from trioserve.link.messages import MessageError
from trioserve.link.step_parts import split_step
from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trioserve import AsyncLLM

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPT = TokensPrompt([5, 6, 7, 8, 9])


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HashEngine]:
    async with open_hash_llm(tmp_path, monkeypatch, max_num_seqs=4) as hash_engine:
        yield hash_engine
        assert hash_engine.llm.num_open_requests == 0


def scraped(llm: AsyncLLM, name: str, **labels: str) -> float:
    return next(
        sample.value
        for family in text_string_to_metric_families(llm.metrics.render().decode())
        for sample in family.samples
        if sample.name == f"trioserve:{name}" and labels.items() <= sample.labels.items()
    )


def num_freed(llm: AsyncLLM) -> float:
    return scraped(llm, "abort_to_free_seconds_count")


def num_unfreed(llm: AsyncLLM) -> int:
    """Aborts whose answer is awaited."""
    return llm._outputs.num_unfreed


def levels(llm: AsyncLLM) -> tuple[float, ...]:
    names = ("num_requests_running", "num_requests_waiting", "num_prompt_tokens_waiting")
    return *(scraped(llm, name) for name in names), scraped(llm, "kv_cache_usage_perc")


# In the core


def freed_now(driver: Driver) -> list[int]:
    return list(driver.core.take_freed().freed)


def test_what_no_step_computes_is_free_at_once() -> None:
    """Waiting, preempted, ended, unknown, and running between two steps."""
    driver = Driver(num_blocks=16, max_num_seqs=2)
    ended = driver.add([1], max_tokens=1)
    driver.drain()
    running, _, waiting = (driver.add([1, 2, 3], max_tokens=20, ignore_eos=True) for _ in range(3))
    driver.step()
    preempted = running
    driver.core.reset_prefix_cache(preempt_running=True)
    held = driver.num_held_blocks
    assert held == 0
    driver.core.abort([preempted, waiting, ended, 999])
    assert freed_now(driver) == [preempted, waiting, ended, 999]
    driver.live -= {preempted, waiting}
    driver.step()
    assert driver.num_held_blocks > 0
    (last,) = driver.live
    driver.core.abort([last])
    assert freed_now(driver) == [last]
    assert driver.num_held_blocks == 0


def test_what_the_step_in_flight_computes_is_free_when_it_is_back() -> None:
    driver = Driver(plan_ahead=True)
    first, second = (driver.add([number] * 9, max_tokens=20, ignore_eos=True) for number in (1, 2))
    driver.begin()
    driver.core.plan_ahead()
    driver.core.abort([first, first])
    assert freed_now(driver) == []
    plan, driver.plan = driver.plan, None
    assert plan is not None
    driver.core.finish(plan, driver.core.execute(plan))
    assert freed_now(driver) == [first, first], "one report for each abort"
    driver.live.remove(first)
    driver.drain()
    assert set(driver.finished) == {second}


@pytest.mark.parametrize("aborted_after", range(8))
def test_every_abort_is_freed_before_the_second_step_after_it(aborted_after: int) -> None:
    """Whenever it comes: counted in the steps that the runner is given."""
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=4, plan_ahead=True)
    for number in range(1, 4):
        driver.add([number] * 7, max_tokens=9, ignore_eos=True)
    for _ in range(aborted_after):
        driver.step(ahead=True)
    driver.begin()
    driver.core.plan_ahead()
    driver.abort(*driver.live)
    num_steps = len(driver.runner.batches)
    driver.end()
    assert not driver.unfreed
    assert driver.num_held_blocks == 0
    assert len(driver.runner.batches) - num_steps <= 1
    driver.begin()
    assert driver.plan is None


def test_an_abort_leaves_the_others_alone() -> None:
    """Complaint 6: the neighbours' tokens are those that they get alone, as the driver checks."""
    driver = Driver(max_num_batched_tokens=6)
    requests = [driver.add([7] * 8 + [number], max_tokens=12, ignore_eos=True) for number in range(1, 5)]
    for _ in range(5):
        driver.step(ahead=True)
    driver.begin()
    driver.abort(requests[1])
    driver.end()
    driver.drain(ahead=True)
    assert set(driver.finished) == {requests[0], requests[2], requests[3]}


def test_a_prefix_that_an_aborted_request_left_is_right() -> None:
    """Complaint 7: the next request finds what was computed, and says what it would have said without."""
    driver = Driver(block_size=4)
    num_free = driver.kv_cache.statistics().num_free
    prompt = [9] * 17
    aborted = driver.add(prompt, max_tokens=20, ignore_eos=True)
    for _ in range(6):
        driver.step(ahead=True)
    driver.begin()
    driver.abort(aborted)
    driver.end()
    assert driver.kv_cache.statistics().num_free == num_free
    again = driver.add(prompt, max_tokens=20, ignore_eos=True)
    driver.drain(ahead=True)
    assert driver.num_cached[again] == 16
    assert len(driver.tokens[again]) == 20  # the driver has compared them with the model's own
    assert driver.kv_cache.statistics().num_free == num_free


# On the link


def test_freed_ids_travel_packed_and_only_once() -> None:
    result = StepResult(freed=[3, 2**40])
    step = pack_step(result, STATS)
    assert list(unpack_freed(step)) == [3, 2**40]
    assert pack_step(StepResult(), STATS).freed == b""
    with pytest.raises(MessageError, match="freed"):
        unpack_freed(attrs.evolve(step, freed=step.freed[:-1]))


def test_a_step_in_parts_reports_them_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts, "_MAX_LOGPROBS", 1)
    tokens = [[SampledToken(1, LogprobRow([1], [-1.0], [1]))] for _ in range(3)]
    result = StepResult(
        request_ids=[1, 2, 3],
        token_ids=[[1]] * 3,
        sampled=tokens,
        finish_reasons=[None] * 3,
        stop_token_ids=[None] * 3,
        num_cached_tokens=[0] * 3,
        prompt_logprobs=[()] * 3,
        freed=[7],
    )
    parts = list(split_step(result))
    assert len(parts) == 3
    assert [list(part.freed) for part in parts] == [[7], [], []]


# From the frontend's side


async def test_the_time_runs_from_the_abort_to_the_news(fake: FakeEngine) -> None:
    async with fake.llm.stream("a", SamplingParams(n=2)):
        pass
    assert len(fake.client.aborted) == 2
    assert num_freed(fake.llm) == 0
    for expected, sequence_id in enumerate([fake.client.aborted[0], 999, fake.client.aborted[1]]):
        fake.client.emit_freed(sequence_id)
        fake.client.emit_freed(sequence_id)  # nobody would, and it does not count
        await wait_all_tasks_blocked()
        assert num_freed(fake.llm) == (1, 1, 2)[expected]
    assert num_unfreed(fake.llm) == 0


async def test_a_stop_string_found_here_is_an_abort_too(fake: FakeEngine) -> None:
    async with fake.llm.stream("a", SamplingParams(stop="X")) as outputs:
        fake.client.emit(fake.client.added[0], "aX")
        await anext(outputs)
    assert fake.client.aborted == [fake.client.added[0].request_id]
    fake.client.emit_freed(*fake.client.aborted)
    await wait_all_tasks_blocked()
    assert num_freed(fake.llm) == 1
    assert num_unfreed(fake.llm) == 0


async def test_an_engine_that_dies_frees_nothing_and_leaves_nothing(fake: FakeEngine) -> None:
    async with fake.llm.stream("a"):
        pass
    assert num_unfreed(fake.llm) == 1
    fake.client.die()
    await fake.llm.wait_dead()
    assert num_unfreed(fake.llm) == num_freed(fake.llm) == 0


# Through all of it, with a real core


@pytest.mark.parametrize("leave_by", ["cancel", "break", "name"])
async def test_everything_that_is_aborted_is_freed_and_counted(engine: HashEngine, leave_by: str) -> None:
    """Complaint 27: the gauges are at 0 by themselves, with no further request."""
    started = 0

    async def run(number: int, scope: trio.CancelScope) -> None:
        nonlocal started
        with scope:
            async with engine.llm.stream(PROMPT, LONG, request_id=str(number)) as outputs:
                started += 1
                if leave_by == "break":
                    await anext(outputs)
                else:
                    async for _ in outputs:
                        pass

    with engine.steps_held():
        async with trio.open_nursery() as nursery:
            scopes = [trio.CancelScope() for _ in range(7)]  # of which 3 wait
            for number, scope in enumerate(scopes):
                nursery.start_soon(run, number, scope)
            await engine.until(lambda: levels(engine.llm)[:2] == (4, 3))
            await engine.wait_begun()
            engine.runner.let_go()
            await engine.wait_begun()
            num_steps = engine.num_steps
            for number, scope in enumerate(scopes):
                if leave_by == "name":
                    engine.llm.abort(str(number))
                else:
                    scope.cancel()
        assert started == 7
        assert engine.llm.num_open_requests == 0
        await engine.until(lambda: num_freed(engine.llm) >= 3)  # those that no step computed
        engine.runner.let_go()
        await engine.until(lambda: num_freed(engine.llm) == 7)
        await engine.until(lambda: levels(engine.llm) == (0, 0, 0, 0))
        assert engine.num_steps - num_steps == 1, "the one that ran"
    assert num_unfreed(engine.llm) == 0
    assert scraped(engine.llm, "request_success_total", finished_reason="abort") == 7


async def test_an_abort_that_comes_too_late_is_answered_at_once_too(engine: HashEngine) -> None:
    """The sequence has ended meanwhile: nothing changes in the core. The step that runs is not waited for."""
    with engine.steps_held():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.llm.complete, PROMPT, SamplingParams(max_tokens=1))
            await engine.wait_begun()
            await engine.until(lambda: levels(engine.llm)[0] == 1)
            engine.llm._requests._abort_sequences([998, 999])
            assert num_unfreed(engine.llm) == 2
            await engine.until(lambda: num_freed(engine.llm) == 2)
            assert engine.num_steps == num_unfreed(engine.llm) == 0
            engine.runner.let_go()


async def test_neighbours_and_successors_of_an_abort_are_right(engine: HashEngine) -> None:
    """Complaints 6 and 7, from the client's side."""

    def expected(prompt: list[int]) -> list[int]:
        history = list(prompt)
        for _ in range(40):
            history.append(next_token(history, seed=1))
        return history[len(prompt) :]

    async def complete(prompt: list[int]) -> None:
        output = await engine.llm.complete(TokensPrompt(prompt), attrs.evolve(LONG, seed=1))
        assert output.outputs[0].token_ids == expected(prompt)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH

    prefix = [5] * 9
    async with trio.open_nursery() as nursery:
        nursery.start_soon(complete, [*prefix, 1])
        nursery.start_soon(complete, [2, 3])
        for _ in range(3):
            async with engine.llm.stream(TokensPrompt(prefix), attrs.evolve(LONG, seed=1)) as outputs:
                for _ in range(2):
                    await anext(outputs)
            nursery.start_soon(complete, prefix)
    await engine.until(lambda: num_freed(engine.llm) == 3)
    await engine.until(lambda: levels(engine.llm) == (0, 0, 0, 0))
