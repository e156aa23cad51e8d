"""What becomes of requests when their engine core dies and another one comes: the part of `Requests`."""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from byte_tokenizer import EOS, byte_model, save_byte_tokenizer
from fake_engine import STATS
from trioserve import BeamSearchParams, EngineArgs, RequestOutputKind, SamplingParams
from trioserve.core.step_result import StepResult
from trioserve.errors import EngineDeadError, EngineRestartingError, InvalidRequestError, OverloadedError
from trioserve.frontend.admission import Admission
from trioserve.frontend.beam_search_request import run_beam_search
from trioserve.frontend.input_processor import InputProcessor, Routing
from trioserve.frontend.output_processor import OutputProcessor
from trioserve.frontend.prompts import TokensPrompt
from trioserve.frontend.requests import Requests
from trioserve.frontend.streaming_input import StreamedRequest, StreamingInput
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.link.columns import pack_step
from trioserve.link.messages import Add, Refused
from trioserve.observability.metrics import EngineMetrics
from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trio.testing import MockClock

    from trioserve.frontend.channel import OutputChannel

DEATH = EngineDeadError("It died.")
PROMPT = TokensPrompt([97, 98])


@attrs.define(eq=False)
class Core:
    """What `Requests` needs of a client. It has room for so many sequences."""

    room: float = float("inf")
    added: list[Add] = attrs.field(factory=list)
    aborted: list[int] = attrs.field(factory=list)

    def add(self, add: Add) -> None:
        if len(self.added) >= self.room:
            raise OverloadedError("full")
        self.add_again(add)

    def add_again(self, add: Add) -> None:
        self.added.append(add)

    def abort(self, sequence_ids: list[int]) -> None:
        self.aborted += sequence_ids


@attrs.define(eq=False)
class Engine:
    """`Requests` whose engine cores come and go by the test's word."""

    requests: Requests
    outputs: OutputProcessor
    metrics: EngineMetrics
    core: Core | None

    async def submit(self, **params: Any) -> OutputChannel:
        return await self.requests.submit(PROMPT, SamplingParams(**params), Routing(), request_id="r")

    def die(self, *, requeue: bool = True) -> None:
        self.core = None
        self.requests.end_of_engine(DEATH, requeue=requeue)

    def restart(self, **core: Any) -> Core:
        self.core = Core(**core)
        self.requests.resubmit()
        return self.core

    def emit(
        self,
        add: Add,
        tokens: Sequence[int | SampledToken],
        finish: FinishReason | None = None,
        prompt_logprobs: Sequence[LogprobRow] = (),
    ) -> None:
        sampled = [token if isinstance(token, SampledToken) else SampledToken(token) for token in tokens]
        result = StepResult(
            request_ids=[add.request_id],
            token_ids=[[token.token_id for token in sampled]],
            sampled=[sampled],
            finish_reasons=[finish],
            stop_token_ids=[None],
            num_cached_tokens=[0],
            prompt_logprobs=[prompt_logprobs],
        )
        to_abort = self.outputs.process(pack_step(result, STATS))
        assert self.core is not None
        self.core.abort(to_abort)

    def assert_empty(self) -> None:
        assert self.outputs.num_requests == self.outputs.num_unfreed == self.outputs.admission.num_open == 0

    @property
    def num_failed(self) -> int:
        return self.metrics.render().decode().count('finished_reason="error",model_name="m"} 1.0')


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., Engine]:
    save_byte_tokenizer(tmp_path)
    model = byte_model(str(tmp_path), context_length=64)

    def make(**args: Any) -> Engine:
        given = {"model": "m", "engine_restart": "on-failure", "requeue_on_restart": True, **args}
        config = EngineArgs.from_dict(given).create_engine_config()
        tokenizer = Tokenizer.from_directory(str(tmp_path))
        metrics = EngineMetrics("m", 64)
        outputs = OutputProcessor(metrics, Admission(config, metrics))

        def get_client() -> Core:
            if engine.core is None:
                raise EngineRestartingError("wait")
            return engine.core

        inputs = InputProcessor(config, model, tokenizer)
        requests = Requests(config, inputs, outputs, tokenizer, get_client)  # type: ignore[arg-type]
        engine = Engine(requests, outputs, metrics, Core())
        return engine

    return make


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@contextmanager
def released(engine: Engine, *channels: OutputChannel) -> Iterator[None]:
    yield
    for channel in channels:
        engine.requests.release(channel)
    engine.assert_empty()


def core_of(engine: Engine) -> Core:
    assert engine.core is not None
    return engine.core


async def test_what_has_given_nothing_goes_to_the_next_core(engine: Engine) -> None:
    """Everything is sent once more as it was: so it gives the same."""
    channel = await engine.submit(n=2, max_tokens=3, temperature=1.0)
    before = core_of(engine).added
    with released(engine, channel):
        engine.die()
        assert not channel.has_news
        after = engine.restart().added
        assert not {add.request_id for add in before} & {add.request_id for add in after}
        assert [attrs.evolve(add, request_id=0) for add in after] == [
            attrs.evolve(add, request_id=0) for add in before
        ]
        for add in after:
            engine.emit(add, [99, 100], FinishReason.LENGTH)
        output = await channel.take()
        assert [completion.text for completion in output.outputs] == ["cd", "cd"]
        assert output.finished
    assert engine.num_failed == 0


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_what_has_given_a_token_fails(engine: Engine, kind: RequestOutputKind) -> None:
    """Whether it was read or not."""
    channel = await engine.submit(n=2, output_kind=kind)
    with released(engine, channel):
        engine.emit(core_of(engine).added[1], [97])
        engine.die()
        with pytest.raises(EngineDeadError, match="It died"):
            await channel.take()
        assert engine.restart().added == []


async def test_prompt_logprobs_are_something_given(engine: Engine) -> None:
    channel = await engine.submit(prompt_logprobs=0)
    with released(engine, channel):
        engine.emit(core_of(engine).added[0], [], prompt_logprobs=[LogprobRow([98], [-1.0], [1])])
        engine.die()
        with pytest.raises(EngineDeadError):
            await channel.take()


@pytest.mark.parametrize("args", [{"requeue_on_restart": False}, {"engine_restart": "never"}])
async def test_only_if_the_user_wants_it(make_engine: Callable[..., Engine], args: dict[str, Any]) -> None:
    engine = make_engine(**args)
    channel = await engine.submit()
    with released(engine, channel):
        assert not channel.adds, "nothing is kept for it"
        engine.die()
        with pytest.raises(EngineDeadError):
            await channel.take()


async def test_the_supervisor_has_the_last_word(engine: Engine) -> None:
    """No core comes any more: those that have waited fail too."""
    channel = await engine.submit()
    with released(engine, channel):
        engine.die()
        engine.die()
        assert not channel.has_news
        engine.die(requeue=False)
        with pytest.raises(EngineDeadError):
            await channel.take()
    assert engine.num_failed == 1


async def test_what_ends_while_it_waits_is_not_sent(engine: Engine) -> None:
    gone, aborted = await engine.submit(), await engine.submit()
    with released(engine, aborted):
        engine.die()
        engine.requests.release(gone)
        engine.requests.abort(["r"])
        assert (await aborted.take()).outputs[0].finish_reason is FinishReason.ABORT
        assert engine.restart().added == []
    assert core_of(engine).aborted == []


async def test_a_request_aborted_before_the_death_has_ended_by_its_abort(engine: Engine) -> None:
    channel = await engine.submit()
    with released(engine, channel):
        engine.requests.abort(["r"])
        engine.die()
        assert (await channel.take()).outputs[0].finish_reason is FinishReason.ABORT
        assert engine.restart().added == []


async def test_late_news_of_the_old_core_change_nothing(engine: Engine) -> None:
    channel = await engine.submit()
    (old,) = core_of(engine).added
    with released(engine, channel):
        engine.die()
        late = pack_step(
            StepResult(
                request_ids=[old.request_id],
                token_ids=[[97]],
                sampled=[[SampledToken(97)]],
                finish_reasons=[None],
                stop_token_ids=[None],
                num_cached_tokens=[0],
                prompt_logprobs=[()],
            ),
            STATS,
        )
        engine.outputs.process(late)
        assert not channel.has_news
        (new,) = engine.restart().added
        engine.outputs.process(late)
        engine.emit(new, [98], FinishReason.LENGTH)
        assert (await channel.take()).outputs[0].text == "b"


async def test_the_deadline_is_still_that_of_the_scope(engine: Engine, autojump_clock: MockClock) -> None:
    with trio.move_on_after(10):
        channel = await engine.submit()
    with trio.move_on_after(2):
        late = await engine.submit()
    with released(engine, channel, late):
        assert core_of(engine).added[0].time_left == 10
        await trio.sleep(3)
        engine.die()
        with pytest.raises(EngineDeadError):
            await late.take()
        await trio.sleep(4)
        (add,) = engine.restart().added
        assert add.time_left == 3
        engine.emit(add, [97], FinishReason.LENGTH)


async def test_a_deadline_that_passes_while_it_waits_leaves_nobody_behind(
    engine: Engine, autojump_clock: MockClock
) -> None:
    with trio.move_on_after(10):
        channel = await engine.submit()
    with released(engine, channel):
        engine.die()
        await trio.sleep(11)
        (add,) = engine.restart().added
        assert add.time_left == 0
        engine.emit(add, [], FinishReason.DEADLINE)
        assert (await channel.take()).finished


async def test_however_many_have_waited_they_are_all_sent(engine: Engine) -> None:
    channels = [await engine.submit(), await engine.submit(n=2), await engine.submit()]
    with released(engine, *channels):
        engine.die()
        core = engine.restart(room=2)
        assert len(core.added) == 4
        with pytest.raises(OverloadedError):
            await engine.submit()
        engine.outputs.process(pack_step(StepResult(freed=core.aborted), STATS))
        for add in core.added:
            engine.emit(add, [97], FinishReason.LENGTH)
        for channel in channels:
            assert (await channel.take()).finished


async def test_where_the_next_core_is_gone_at_once_they_wait_on(engine: Engine) -> None:
    channel = await engine.submit()
    with released(engine, channel):
        for _ in range(3):
            engine.die()
            with pytest.raises(EngineRestartingError):
                engine.requests.resubmit()
        (add,) = engine.restart().added
        engine.emit(add, [97], FinishReason.LENGTH)
        assert (await channel.take()).finished


async def test_a_request_that_kills_cores_kills_two_and_no_more(engine: Engine) -> None:
    """Else it would use up all restarts, and the server with them."""
    channel = await engine.submit()
    with released(engine, channel):
        engine.die()
        assert len(engine.restart().added) == 1
        engine.die()
        with pytest.raises(EngineDeadError), trio.fail_after(5):
            await channel.take()
        assert engine.restart().added == []


async def test_a_refused_request_is_not_sent_again(engine: Engine) -> None:
    channel = await engine.submit()
    with released(engine, channel):
        (add,) = core_of(engine).added
        engine.outputs.process(Refused(request_id=add.request_id, message="No.", parameter=None))
        engine.die()
        assert engine.restart().added == []
        with pytest.raises(InvalidRequestError):
            await channel.take()


async def test_what_the_old_core_had_received_and_said_counts_no_more(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_num_queued_tokens=4)

    def report(num_queued_tokens: int) -> None:
        stats = attrs.evolve(STATS, is_full=True, num_received=1, num_queued_tokens=num_queued_tokens)
        engine.outputs.process(pack_step(StepResult(), stats))

    channel = await engine.submit()
    report(100)
    engine.die()
    engine.restart()
    report(2)
    with released(engine, channel, await engine.submit()):
        engine.die(requeue=False)


async def test_each_round_is_given_to_two_cores(engine: Engine) -> None:
    search = Search(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(search.run)
        await wait_all_tasks_blocked()
        engine.die()
        (first,) = engine.restart().added
        engine.emit(first, [beam_token(97)], FinishReason.LENGTH)
        await wait_all_tasks_blocked()
        engine.die()
        for add in engine.restart().added:
            engine.emit(add, [beam_token(101)], FinishReason.LENGTH)
    assert search.sequences == 2
    engine.assert_empty()


async def test_while_there_is_no_core_nothing_is_registered(engine: Engine) -> None:
    engine.die()
    with pytest.raises(EngineRestartingError):
        await engine.submit()
    engine.assert_empty()


async def test_a_core_that_dies_during_tokenizing_leaves_nothing(engine: Engine) -> None:
    tokenize = engine.requests.inputs.tokenize

    async def and_die(prompt: Any) -> Any:
        engine.die()
        return await tokenize(prompt)

    engine.requests.inputs.tokenize = and_die  # type: ignore[method-assign]
    with pytest.raises(EngineRestartingError):
        await engine.submit()
    engine.assert_empty()
    assert engine.restart().added == []


# Requests that run in rounds


def beam_token(token_id: int) -> SampledToken:
    others = [token_id, token_id, 98, 99, 100]
    return SampledToken(token_id, LogprobRow(others, [-1.0, -1.0, -2.0, -3.0, -4.0], [1, 1, 2, 3, 4]))


@attrs.define(eq=False)
class Search:
    """A beam search that has come to its second round."""

    engine: Engine
    sequences: int = 0
    error: Exception | None = None

    async def run(self) -> None:
        params = BeamSearchParams(beam_width=2, max_tokens=2)
        try:
            found = await run_beam_search(
                self.engine.requests, PROMPT, params, Routing(), request_id=None, eos_token_ids=[EOS]
            )
            self.sequences = len(found.sequences)
        except EngineDeadError as error:
            self.error = error

    async def begin(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.run)
        await wait_all_tasks_blocked()
        self.engine.emit(core_of(self.engine).added[0], [beam_token(97)], FinishReason.LENGTH)
        await wait_all_tasks_blocked()


async def test_a_round_of_a_beam_search_is_run_again(engine: Engine) -> None:
    search = Search(engine)
    async with trio.open_nursery() as nursery:
        await search.begin(nursery)
        engine.die()
        await wait_all_tasks_blocked()
        second_round = engine.restart().added
        assert [len(array("i", add.prompt_token_ids)) for add in second_round] == [3, 3]
        for add in second_round:
            engine.emit(add, [beam_token(101)], FinishReason.LENGTH)
    assert search.sequences == 2
    engine.assert_empty()


async def test_a_round_of_which_some_beams_have_come_fails(engine: Engine) -> None:
    search = Search(engine)
    async with trio.open_nursery() as nursery:
        await search.begin(nursery)
        engine.emit(core_of(engine).added[-1], [beam_token(101)], FinishReason.LENGTH)
        engine.die()
    assert isinstance(search.error, EngineDeadError)
    engine.assert_empty()


async def test_streaming_input_waits_for_the_next_core_only_with_an_unbegun_answer(engine: Engine) -> None:
    send, receive = trio.open_memory_channel[StreamingInput](2)
    send.send_nowait(StreamingInput("a"))
    async with send, receive:
        request = StreamedRequest.open(
            engine.requests, receive, SamplingParams(max_tokens=1), Routing(), request_id=None
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(request.take)
            await wait_all_tasks_blocked()
            engine.die()
            (add,) = engine.restart().added
            engine.emit(add, [98], FinishReason.LENGTH)
        engine.die()
        engine.restart()
        send.send_nowait(StreamingInput("b"))
        with pytest.raises(EngineDeadError):
            await request.take()
        request.release()
    engine.assert_empty()
