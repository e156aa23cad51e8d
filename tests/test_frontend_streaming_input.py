"""Prompts that come in pieces: what the engine gets, what the consumer sees, and who closes what."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from byte_tokenizer import EOS
from trioserve import RequestOutputKind, SamplingParams, StreamingInput
from trioserve.errors import ClosedError, EngineDeadError, InvalidRequestError
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from fake_engine import FakeEngine
    from trioserve.link.messages import Add
    from trioserve.outputs import RequestOutput

DELTA = RequestOutputKind.DELTA
CUMULATIVE = RequestOutputKind.CUMULATIVE
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


class Pieces:
    """An async generator of prompts that keeps a diary."""

    def __init__(self, *pieces: Any) -> None:
        self._pieces = pieces
        self.num_fetched = 0
        self.was_closed = False

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        try:
            for piece in self._pieces:
                await trio.lowlevel.checkpoint()
                if isinstance(piece, Exception):
                    raise piece
                self.num_fetched += 1
                yield piece
        finally:
            self.was_closed = True


def prompt_of(add: Add) -> bytes:
    return bytes(array("i", add.prompt_token_ids).tolist())


async def answer(
    fake: FakeEngine,
    outputs: AsyncIterator[RequestOutput],
    text: Any,
    finish: FinishReason | None = FinishReason.LENGTH,
) -> RequestOutput:
    """Read an output, for which a piece is fetched; the engine answers it once the reader waits for that."""
    number = len(fake.client.added)
    results: list[RequestOutput] = []

    async def take() -> None:
        results.append(await anext(outputs))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await wait_all_tasks_blocked()
        assert len(fake.client.added) == number + 1
        fake.client.emit(fake.client.added[-1], text, finish)
    return results[0]


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_each_piece_follows_all_that_was_said_before(fake: FakeEngine, kind: RequestOutputKind) -> None:
    pieces = Pieces("one ", StreamingInput(list(b"two "), SamplingParams(max_tokens=7, seed=3)), "")
    params = SamplingParams(output_kind=kind)
    async with fake.llm.stream(pieces, params, request_id="mine", cache_salt="s", priority=2) as outputs:
        assert fake.client.added == []
        seen = [await answer(fake, outputs, text) for text in ("1 ", "2 ", "3")]
        last = await anext(outputs)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
    assert [prompt_of(add) for add in fake.client.added] == [b"one ", b"one 1 two ", b"one 1 two 2 "]
    assert [add.params.max_tokens for add in fake.client.added] == [16, 7, 16]
    assert {(add.cache_salt, add.priority, add.streams) for add in fake.client.added} == {("s", 2, True)}
    assert [output.outputs[0].text for output in seen] == ["1 ", "2 ", "3"]
    assert [output.outputs[0].finish_reason for output in seen] == [FinishReason.LENGTH] * 3
    assert [output.finished for output in [*seen, last]] == [False] * 3 + [True]
    assert {output.request_id for output in [*seen, last]} == {"mine"}
    assert bytes(seen[1].prompt_token_ids) == b"one 1 two "
    assert last.outputs[0].text == ("" if kind is DELTA else "3")
    assert last.outputs[0].finish_reason is FinishReason.LENGTH
    assert fake.client.aborted == []
    assert pieces.was_closed


async def test_deltas_of_one_answer_come_one_by_one(fake: FakeEngine) -> None:
    async with fake.llm.stream(Pieces("a", "b"), SamplingParams(output_kind=DELTA)) as outputs:
        first = await answer(fake, outputs, "x", None)
        assert first.outputs[0].finish_reason is None
        fake.client.emit(fake.client.added[0], [ord("y"), EOS], FinishReason.STOP)
        assert (await anext(outputs)).outputs[0].text == "y"
        await answer(fake, outputs, "z")
    # The end-of-sequence token was generated, so it belongs to what is known.
    assert array("i", fake.client.added[1].prompt_token_ids).tolist() == [*b"axy", EOS, *b"b"]


async def test_a_piece_is_not_fetched_before_the_answer_to_the_one_before_has_ended(
    fake: FakeEngine,
) -> None:
    pieces = Pieces("a", "b")
    async with fake.llm.stream(pieces, SamplingParams(output_kind=DELTA)) as outputs:
        assert pieces.num_fetched == 0
        await answer(fake, outputs, "x", None)
        assert pieces.num_fetched == 1
        fake.client.emit(fake.client.added[0], "y", FinishReason.STOP)
        await anext(outputs)
        assert pieces.num_fetched == 1


async def test_generate_takes_pieces_too(fake: FakeEngine) -> None:
    pieces = Pieces("a", "b")
    generator = fake.llm.generate(pieces, SamplingParams(output_kind=DELTA))
    await answer(fake, generator, "x")
    await generator.aclose()
    assert pieces.was_closed
    assert fake.llm.num_open_requests == 0


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"n": 2}, "n"),
        ({"output_kind": FINAL_ONLY}, "output_kind"),
        ({"stop": "x"}, "stop"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_makes_no_sense_with_pieces_is_refused(
    fake: FakeEngine, params: dict[str, Any], parameter: str
) -> None:
    pieces = Pieces("a")
    with pytest.raises(InvalidRequestError, match="streaming input") as caught:
        async with fake.llm.stream(pieces, SamplingParams(**params)):
            pass
    assert caught.value.parameter == parameter
    assert pieces.num_fetched == fake.llm.num_open_requests == 0
    if parameter != "output_kind":  # of a piece, it does not count
        async with fake.llm.stream(Pieces(StreamingInput("a", SamplingParams(**params)))) as outputs:
            with pytest.raises(InvalidRequestError, match="streaming input"):
                await anext(outputs)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [((), "no piece"), (("",), "empty"), (("a", "x" * 127), "leaves no room"), (([300],), "vocabulary")],
)
async def test_a_piece_that_cannot_be_served_ends_the_request(
    fake: FakeEngine, pieces: tuple[Any, ...], message: str
) -> None:
    async with fake.llm.stream(Pieces(*pieces)) as outputs:
        for _ in pieces[1:]:
            await answer(fake, outputs, "y")
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await anext(outputs)
        assert caught.value.parameter == "prompt"
        assert fake.llm.num_open_requests == 0
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)


async def test_an_error_of_the_input_passes_when_the_request_is_gone(fake: FakeEngine) -> None:
    async with fake.llm.stream(Pieces("a", KeyError("mine"))) as outputs:
        await answer(fake, outputs, "x")
        with pytest.raises(KeyError, match="mine"):
            await anext(outputs)
        assert fake.llm.num_open_requests == 0


@pytest.mark.parametrize("leave", ["break", "raise", "cancel"])
async def test_leaving_the_scope_ends_the_request_and_the_generator(fake: FakeEngine, leave: str) -> None:
    pieces = Pieces("a", "b")
    with trio.CancelScope() as scope:
        try:
            async with fake.llm.stream(pieces, SamplingParams(output_kind=DELTA)) as outputs:
                await answer(fake, outputs, "x", None)
                if leave == "raise":
                    raise KeyError
                if leave == "cancel":
                    scope.cancel()
                    await anext(outputs)
        except KeyError:
            assert leave == "raise"
    assert fake.client.aborted == [fake.client.added[0].request_id]
    assert pieces.was_closed


async def test_a_cancellation_while_waiting_for_a_piece_leaves_nothing(fake: FakeEngine) -> None:
    send, receive = trio.open_memory_channel[str](0)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery, fake.llm.stream(receive) as outputs:
            nursery.start_soon(anext, outputs)
            await wait_all_tasks_blocked()
            scope.cancel()
    assert fake.client.added == []
    assert fake.llm.num_open_requests == 0
    # The channel is its owner's: it is still open.
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send.send, "x")
        assert await receive.receive() == "x"
    send.close()
    receive.close()


async def test_an_abort_while_an_answer_runs_is_the_end(fake: FakeEngine) -> None:
    pieces = Pieces("a", "b")
    async with fake.llm.stream(pieces, SamplingParams(output_kind=DELTA), request_id="mine") as outputs:
        await answer(fake, outputs, "x", None)
        fake.llm.abort("mine")
        output = await anext(outputs)
        assert output.finished
        assert output.outputs[0].finish_reason is FinishReason.ABORT
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
    assert pieces.num_fetched == 1


async def test_an_abort_between_two_pieces_shows_with_the_next(fake: FakeEngine) -> None:
    async with fake.llm.stream(Pieces("a", "b"), request_id="mine") as outputs:
        await answer(fake, outputs, "x")
        fake.llm.abort("mine")
        output = await anext(outputs)
        assert output.finished
        assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert len(fake.client.added) == 1


async def test_the_engines_death_between_two_pieces_shows_with_the_next(fake: FakeEngine) -> None:
    async with fake.llm.stream(Pieces("a", "b")) as outputs:
        await answer(fake, outputs, "x")
        fake.client.die("out of memory")
        await wait_all_tasks_blocked()
        with pytest.raises(EngineDeadError, match="out of memory"):
            await anext(outputs)


async def test_a_stream_whose_scope_has_ended_fetches_nothing(fake: FakeEngine) -> None:
    pieces = Pieces("a")
    async with fake.llm.stream(pieces) as outputs:
        pass
    with trio.fail_after(5), pytest.raises(ClosedError, match="scope"):
        await anext(outputs)
    assert pieces.num_fetched == 0


async def test_what_cannot_be_iterated_after_all_leaves_no_request(fake: FakeEngine) -> None:
    class Broken:
        def __aiter__(self) -> Any:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        async with fake.llm.stream(Broken()):
            raise AssertionError("it cannot start")
    assert fake.llm.num_open_requests == 0
