"""Who is let in and who is refused at the door, before any work is done."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from fake_engine import STATS, FakeEngine, open_fake_llm
from hash_engine import HashEngine, open_hash_llm
from trioserve import BeamSearchParams, EngineArgs, SamplingParams
from trioserve.errors import InvalidRequestError, OverloadedError
from trioserve.frontend.admission import Admission
from trioserve.frontend.prompts import TokensPrompt
from trioserve.frontend.streaming_input import StreamingInput
from trioserve.observability.metrics import EngineMetrics
from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trioserve import AsyncLLM

LONG = SamplingParams(max_tokens=30, ignore_eos=True)

Door = Any
"""Opens a fake engine with limits: 2 seats and room for 3 more, if nothing else is said."""


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    def open_door(**args: Any) -> AbstractAsyncContextManager[FakeEngine]:
        args = {"max_num_seqs": 2, "max_num_queued_reqs": 3, **args}
        return open_fake_llm(tmp_path, monkeypatch, **args)

    return open_door


def refusals(llm: AsyncLLM) -> dict[str, float]:
    return {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(llm.metrics.render().decode())
        for sample in family.samples
        if sample.name == "trioserve:requests_refused_total"
    }


@contextmanager
def refused(match: str = "overloaded") -> Iterator[None]:
    """And not left waiting, as one that is let in would be."""
    with pytest.raises(OverloadedError, match=match), trio.fail_after(10):
        yield


def num_open(llm: AsyncLLM) -> int:
    """Places that are taken."""
    return llm._outputs.admission.num_open


async def report(fake: FakeEngine, **levels: Any) -> None:
    """The core says how it is."""
    fake.client.emit_freed(stats=attrs.evolve(STATS, **levels))
    await wait_all_tasks_blocked()


async def open_streams(
    fake: FakeEngine, nursery: trio.Nursery, count: int, prompt: Any = "x"
) -> list[trio.CancelScope]:
    async def run(scope: trio.CancelScope) -> None:
        with scope:
            async with fake.llm.stream(prompt, LONG):
                await trio.sleep_forever()

    scopes = [trio.CancelScope() for _ in range(count)]
    for scope in scopes:
        nursery.start_soon(run, scope)
    await wait_all_tasks_blocked()
    return scopes


# Sequences


async def test_a_burst_on_an_idle_engine_fills_seats_and_queue_and_no_more(door: Door) -> None:
    async with door() as fake, trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 5)
        assert len(fake.client.added) == 5
        with refused("4 sequences would wait, and max_num_queued_reqs is 3"):
            await fake.llm.complete("x")
        with pytest.raises(OverloadedError):
            fake.llm.check_room()
        assert len(fake.client.added) == 5
        assert refusals(fake.llm)["queue_full"] == 2
        nursery.cancel_scope.cancel()
    assert num_open(fake.llm) == 0


async def test_a_refused_request_costs_no_tokenizing(door: Door) -> None:
    async with door(max_num_queued_reqs=0) as fake, trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 2)
        with refused():
            await fake.llm.complete("\ud800")  # which tokenizing would refuse
        nursery.cancel_scope.cancel()


async def test_whoever_leaves_makes_room_by_any_way(door: Door) -> None:
    async with door() as fake, trio.open_nursery() as nursery:
        scopes = await open_streams(fake, nursery, 5)
        scopes[0].cancel()
        await wait_all_tasks_blocked()
        fake.llm.check_room()
        (scopes[0],) = await open_streams(fake, nursery, 1)
        with pytest.raises(OverloadedError):
            fake.llm.check_room()
        first, second, *_ = (add for add in fake.client.added if add.request_id not in fake.client.aborted)
        fake.client.emit(first, "a", FinishReason.STOP)  # ended, and its scope still open
        fake.client.refuse(second, "No.", "n")
        await wait_all_tasks_blocked()
        fake.llm.check_room(2)
        with pytest.raises(OverloadedError):
            fake.llm.check_room(3)
        nursery.cancel_scope.cancel()
    assert num_open(fake.llm) == 0


async def test_n_completions_count_n_times_and_each_leaves_by_itself(door: Door) -> None:
    async with door() as fake:
        async with fake.llm.stream("a", SamplingParams(n=4)):
            fake.llm.check_room(1)
            with refused():
                await fake.llm.complete("x", SamplingParams(n=2))
            fake.client.emit(fake.client.added[2], "a", FinishReason.LENGTH)
            await wait_all_tasks_blocked()
            fake.llm.check_room(2)
            with pytest.raises(OverloadedError):
                fake.llm.check_room(3)
        assert num_open(fake.llm) == 0


async def test_a_request_that_can_never_fit_is_wrong_and_not_refused(door: Door) -> None:
    async with door() as fake:
        fake.llm.check_room(5)
        with pytest.raises(InvalidRequestError, match=r"6 sequences .* at most 5") as caught:
            fake.llm.check_room(6)
        assert caught.value.parameter == "n"
        with pytest.raises(InvalidRequestError, match="at most 5"):
            await fake.llm.complete("x", SamplingParams(n=6))
        with pytest.raises(InvalidRequestError, match="at most 5") as caught:
            await fake.llm.beam_search("x", BeamSearchParams(beam_width=6, max_tokens=2))
        assert caught.value.parameter == "beam_width"
        assert set(refusals(fake.llm).values()) == {0}


async def test_without_limits_nobody_is_refused(fake: FakeEngine) -> None:
    async with trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 300)
        await report(fake, num_running=1, num_waiting=299, is_full=True, num_queued_tokens=10**9)
        fake.llm.check_room(10**6)
        nursery.cancel_scope.cancel()
    assert num_open(fake.llm) == 0


async def test_an_engine_that_cannot_use_its_seats_is_full_earlier(door: Door) -> None:
    """Its blocks are all taken by one."""
    async with door() as fake, trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 4)
        fake.llm.check_room()
        await report(fake, num_running=1, num_waiting=3, is_full=True)
        with pytest.raises(OverloadedError):
            fake.llm.check_room()
        await report(fake, num_running=1, num_waiting=3)  # there is room for them in the next steps
        fake.llm.check_room()
        nursery.cancel_scope.cancel()


async def test_what_was_said_of_others_is_no_reason_to_refuse(door: Door) -> None:
    """All were aborted, and the core has not heard of it."""
    async with door(max_num_queued_tokens=10) as fake:
        async with trio.open_nursery() as nursery:
            await open_streams(fake, nursery, 4)
            await report(fake, num_running=0, num_waiting=4, is_full=True, num_queued_tokens=10**6)
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            await open_streams(fake, nursery, 5)
            assert len(fake.client.added) == 9
            nursery.cancel_scope.cancel()


async def test_the_place_is_taken_while_a_prompt_is_tokenized(door: Door) -> None:
    async with door(max_num_queued_reqs=0) as fake, trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 1)
        release = trio.Event()
        tokenize = fake.llm._requests.inputs.tokenize

        async def slowly(prompt: Any) -> Any:
            await release.wait()
            return await tokenize(prompt)

        fake.llm._requests.inputs.tokenize = slowly  # type: ignore[method-assign]
        (scope,) = await open_streams(fake, nursery, 1)
        with pytest.raises(OverloadedError):
            fake.llm.check_room()
        scope.cancel()
        await wait_all_tasks_blocked()
        fake.llm.check_room()
        await open_streams(fake, nursery, 1)
        release.set()
        await wait_all_tasks_blocked()
        assert len(fake.client.added) == 2
        nursery.cancel_scope.cancel()
    assert num_open(fake.llm) == 0


@pytest.mark.parametrize("prompt", ["", "x" * 500, "\ud800"])
async def test_a_wrong_request_gives_its_place_back(door: Door, prompt: str) -> None:
    async with door() as fake:
        with pytest.raises(InvalidRequestError):
            await fake.llm.complete(prompt, SamplingParams(n=3))
        assert num_open(fake.llm) == 0


async def test_an_engine_that_dies_leaves_no_place_taken(door: Door) -> None:
    async with door() as fake, trio.open_nursery() as nursery:
        scopes = await open_streams(fake, nursery, 3)
        fake.client.die()
        await fake.llm.wait_dead()
        assert num_open(fake.llm) == 0
        for scope in scopes:
            scope.cancel()


# Requests that run in rounds


async def test_a_beam_search_that_has_begun_is_not_refused_in_the_middle(door: Door) -> None:
    async with door() as fake, trio.open_nursery() as nursery:
        search = partial(fake.llm.beam_search, "x", BeamSearchParams(beam_width=2, max_tokens=5))
        nursery.start_soon(search)
        await wait_all_tasks_blocked()
        assert len(fake.client.added) == 1  # its first round; its place is for both beams
        await open_streams(fake, nursery, 3)
        with refused():
            await search()
        row = fake.client.added[0]
        assert num_open(fake.llm) == 5
        fake.client.emit(row, _logprob_token(), FinishReason.LENGTH)
        await wait_all_tasks_blocked()
        assert len(fake.client.added) == 1 + 3 + 2
        assert num_open(fake.llm) == 5
        nursery.cancel_scope.cancel()
    assert num_open(fake.llm) == 0


def _logprob_token() -> list[Any]:
    return [SampledToken(5, LogprobRow([5, 5, 6, 7, 8], [-1.0, -1.0, -2.0, -3.0, -4.0], [1, 1, 2, 3, 4]))]


async def test_streaming_input_keeps_its_place_between_pieces(door: Door) -> None:
    send, receive = trio.open_memory_channel[StreamingInput](1)
    async with door() as fake, trio.open_nursery() as nursery, receive:
        async with fake.llm.stream(receive, SamplingParams(max_tokens=1)) as outputs:
            await open_streams(fake, nursery, 4)
            with pytest.raises(OverloadedError):
                fake.llm.check_room()
            for piece in "ab":
                await send.send(StreamingInput(piece))
                async with trio.open_nursery() as reading:
                    reading.start_soon(anext, outputs)
                    await wait_all_tasks_blocked()
                    fake.client.emit(fake.client.added[-1], "c", FinishReason.LENGTH)
                assert num_open(fake.llm) == 5
        assert num_open(fake.llm) == 4
        await open_streams(fake, nursery, 1)
        with refused():
            await fake.llm.stream(receive, SamplingParams()).__aenter__()
        nursery.cancel_scope.cancel()
    send.close()
    assert num_open(fake.llm) == 0


# Tokens


@pytest.fixture
def token_door(door: Door) -> Door:
    """10 prompt tokens may wait; a step takes 4."""
    return partial(
        door, max_num_queued_reqs=None, max_num_queued_tokens=10, max_num_batched_tokens=4, max_num_seqs=4
    )


async def test_prompt_tokens_that_wait_are_limited(token_door: Door) -> None:
    async with token_door() as fake, trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 2, TokensPrompt([5] * 7))  # 14: the next step takes 4, and 10 wait
        with pytest.raises(
            OverloadedError, match=r"10 prompt tokens are waiting .* max_num_queued_tokens \(10\)"
        ):
            await fake.llm.complete(TokensPrompt([5]))
        with pytest.raises(OverloadedError):
            fake.llm.check_room()
        assert refusals(fake.llm)["queued_tokens"] == 2
        await report(fake, num_received=1, num_running=1)  # the second one was on its way
        await open_streams(fake, nursery, 1, TokensPrompt([5] * 7))
        with pytest.raises(OverloadedError):
            fake.llm.check_room()
        await report(fake, num_received=3, num_running=2, num_waiting=1, num_queued_tokens=7)
        fake.llm.check_room()
        nursery.cancel_scope.cancel()


async def test_tokens_of_aborted_requests_do_not_stand_in_for_those_of_others(token_door: Door) -> None:
    """The core reports that it has received them when they are long forgotten."""
    async with token_door() as fake:
        async with trio.open_nursery() as nursery:
            await open_streams(fake, nursery, 1, TokensPrompt([5] * 9))
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            await open_streams(fake, nursery, 1, TokensPrompt([5] * 12))
            await report(fake, num_received=1)
            with refused("8 prompt tokens are waiting"):
                await fake.llm.complete(TokensPrompt([5] * 3))
            nursery.cancel_scope.cancel()


async def test_where_seats_lack_the_next_step_takes_none_of_the_waiting_tokens(token_door: Door) -> None:
    async with token_door() as fake, trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 1)
        await report(fake, num_received=1, num_running=1, num_waiting=2, num_queued_tokens=9, is_full=True)
        fake.llm.check_room()
        with refused():
            await fake.llm.complete(TokensPrompt([5, 5]))  # known when it has been tokenized
        assert len(fake.client.added) == 1
        assert num_open(fake.llm) == 1
        nursery.cancel_scope.cancel()


async def test_a_prompt_beyond_the_limit_is_let_in_if_nothing_waits(token_door: Door) -> None:
    async with token_door() as fake, trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 1, TokensPrompt([5] * 90))
        assert len(fake.client.added) == 1
        with refused():
            await fake.llm.complete(TokensPrompt([5] * 90))
        nursery.cancel_scope.cancel()


async def test_n_completions_bring_their_prompt_n_times(token_door: Door) -> None:
    async with token_door() as fake, trio.open_nursery() as nursery:
        await open_streams(fake, nursery, 1, TokensPrompt([5] * 6))
        with refused():
            await fake.llm.complete(TokensPrompt([5] * 3), SamplingParams(n=3))
        nursery.cancel_scope.cancel()


# When to come again


@attrs.define
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock, **args: Any) -> Admission:
    config = EngineArgs.from_dict({"model": "x", "max_num_seqs": 10, **args}).create_engine_config()
    return Admission(config, EngineMetrics("x", 10), clock)


def retry_after(admission: Admission, num_sequences: int = 1) -> float:
    with pytest.raises(OverloadedError) as caught:
        admission.check(num_sequences)
    return caught.value.retry_after


def test_the_time_to_come_again_is_what_it_takes_for_enough_to_end() -> None:
    clock = Clock()
    door = admission(clock, max_num_queued_reqs=90)
    place = door.reserve(100)
    assert retry_after(door) == 1, "nothing is known yet, so the least"
    for _ in range(20):  # one in half a second
        clock.now += 0.5
        place.leave()
        door.reserve(1)
    assert retry_after(door) == 1
    assert retry_after(door, 40) == 20
    assert retry_after(door, 100) == 50
    clock.now += 30  # nobody ends, and it looks worse
    assert retry_after(door, 20) == 40
    assert retry_after(door, 100) == 60, "the most"


def test_the_time_before_a_pause_without_requests_says_nothing() -> None:
    clock = Clock()
    door = admission(clock, max_num_queued_reqs=0)
    door.reserve(10).close()
    clock.now += 50
    place = door.reserve(10)
    clock.now += 6
    place.leave()
    door.reserve(1)
    assert retry_after(door) == 6


# With a core that schedules


async def test_limits_hold_with_a_core_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves of requests, ever more than there is room for: never more than seats and queue are open, all that
    were let in are served, and when they are over, as many are let in as at first."""
    args = {"max_num_seqs": 2, "max_num_queued_reqs": 3, "max_num_queued_tokens": 40}
    async with open_hash_llm(tmp_path, monkeypatch, num_blocks=24, **args) as engine:
        for _ in range(6):
            assert await _wave(engine, 12) >= 5
            await engine.until(lambda: engine.llm.metrics.totals().running == 0)
            assert num_open(engine.llm) == 0


async def _wave(engine: HashEngine, count: int) -> int:
    """How many were served."""
    num_served = most_open = 0

    async def run(number: int) -> None:
        nonlocal num_served, most_open
        try:
            output = await engine.llm.complete(
                TokensPrompt([1 + number] * 4), SamplingParams(max_tokens=number, ignore_eos=True)
            )
        except OverloadedError:
            return
        assert len(output.outputs[0].token_ids) == number
        num_served += 1

    async with trio.open_nursery() as nursery:
        for number in range(1, count + 1):
            nursery.start_soon(run, number)
            await trio.lowlevel.checkpoint()
            most_open = max(most_open, num_open(engine.llm))
    assert most_open <= 5
    return num_served


async def test_what_has_come_and_gone_waits_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is never a moment at which nothing is open."""
    send, receive = trio.open_memory_channel[StreamingInput](0)
    args = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_num_queued_tokens": 20}
    one_token = SamplingParams(max_tokens=1)
    async with (
        open_hash_llm(tmp_path, monkeypatch, **args) as engine,
        send,
        receive,
        engine.llm.stream(receive, one_token),
    ):
        for _ in range(10):
            await engine.llm.complete(TokensPrompt([5] * 5), one_token)


async def test_a_paused_engine_runs_nobody_so_all_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"max_num_seqs": 4, "max_num_queued_reqs": 2}
    async with open_hash_llm(tmp_path, monkeypatch, **args) as engine:
        await engine.llm.pause_generation("keep")
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(engine.llm.complete, TokensPrompt([5]), SamplingParams(max_tokens=2))
            await engine.until(lambda: engine.llm.metrics.totals().waiting == 2)
            with pytest.raises(OverloadedError):
                engine.llm.check_room()
            await engine.llm.resume_generation()
        engine.llm.check_room(6)


@pytest.fixture
async def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HashEngine]:
    async with open_hash_llm(tmp_path, monkeypatch, max_num_seqs=1, max_num_queued_tokens=20) as engine:
        with engine.steps_held():
            yield engine


async def test_the_core_says_how_many_tokens_wait(held: HashEngine) -> None:
    async with trio.open_nursery() as nursery:
        for length in (9, 12, 4):
            nursery.start_soon(held.llm.complete, TokensPrompt([5] * length), LONG)
            await wait_all_tasks_blocked()
        await held.wait_begun()
        assert held.llm.metrics.render().count(b"num_prompt_tokens_waiting{") == 1
        held.runner.let_go()
        await held.wait_begun()
        await held.until(lambda: b'waiting{engine="0",model_name="hash"} 16.0' in held.llm.metrics.render())
        with refused():
            await held.llm.complete(TokensPrompt([5] * 5))
        nursery.cancel_scope.cancel()
        held.runner.let_go(2)
    await held.until(lambda: b'tokens_waiting{engine="0",model_name="hash"} 0.0' in held.llm.metrics.render())
