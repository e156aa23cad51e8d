"""Frames and messages: what arrives is what was sent, and what is broken is said to be."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from fake_engine import STATS, FakeEngineClient
from helpers_llm import MODEL
from trioserve.args import EngineArgs
from trioserve.config import GenerationDefaults, LogConfig, StructuredOutputsConfig
from trioserve.core.step_result import StepResult
from trioserve.errors import ClosedError, OverloadedError
from trioserve.link.client import EngineCoreClient, config_hash
from trioserve.link.columns import pack_step, unpack_step
from trioserve.link.framing import MAX_FRAME_SIZE, FrameReader, frame
from trioserve.link.message_stream import MessageStream
from trioserve.link.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Hello,
    MessageError,
    Refused,
    StepOutputs,
    decode_message,
    encode_message,
)
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import ThinkingBudget, TokenConstraints
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
async def test_frames_arrive_whole_however_the_stream_is_cut(size: int) -> None:
    bodies = [b"", b"a", b"bc" * 500, b"\x00"]
    data = b"".join(map(frame, bodies))
    sender, receiver = memory_stream_pair()
    reader = FrameReader(receiver)

    async def send() -> None:
        for start in range(0, len(data), size):
            await sender.send_all(data[start : start + size])
        await sender.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert [await reader.receive() for _ in bodies] == bodies
        assert await reader.receive() is None


async def test_a_cancelled_receive_loses_nothing() -> None:
    sender, receiver = memory_stream_pair()
    reader = FrameReader(receiver)
    data = frame(b"hello")
    await sender.send_all(data[:6])
    with trio.move_on_after(0):
        await reader.receive()
    await sender.send_all(data[6:])
    assert await reader.receive() == b"hello"


async def test_a_frame_cut_by_the_end_and_an_oversized_one_are_errors() -> None:
    sender, receiver = memory_stream_pair()
    await sender.send_all(frame(b"hello")[:-1])
    await sender.aclose()
    with pytest.raises(MessageError, match="inside a frame"):
        await FrameReader(receiver).receive()

    sender, receiver = memory_stream_pair()
    await sender.send_all(struct.pack("<I", MAX_FRAME_SIZE + 1))
    with pytest.raises(MessageError, match="over the limit"):
        await FrameReader(receiver).receive()


def make_add() -> Add:
    params = SamplingParams(stop="x", logit_bias={"3": 4}, max_tokens=5, temperature=0.5)
    return Add(
        request_id=3,
        prompt_token_ids=b"1234",
        params=params,
        constraints=TokenConstraints(
            bad_words=((1, 2), (3,)),
            thinking=ThinkingBudget(max_tokens=4, start_token_ids=(5,), end_token_ids=(6, 7)),
        ),
        seed=9,
        streams=True,
        time_left=2.5,
        cache_salt="s",
    )


@pytest.mark.parametrize(
    "message", [make_add(), Refused(request_id=4, message="no", parameter="structured_outputs")]
)
def test_messages_survive_the_wire(message: Add | Refused) -> None:
    assert decode_message(encode_message(message)) == message


def test_whole_numbers_of_seconds_are_what_the_core_reads() -> None:
    args = EngineArgs(
        model="m",
        log=LogConfig(stats_interval=0),
        engine_restart_backoff=1,
        step_timeout=3,
        startup_timeout=9,
        structured_outputs_config=StructuredOutputsConfig(compile_timeout=2),
        override_generation_config=GenerationDefaults(temperature=1, top_p=1, min_p=0, repetition_penalty=1),
    )
    config = args.create_engine_config()
    model = attrs.evolve(MODEL, generation=config.model.generation)
    hello = Hello(protocol=PROTOCOL_VERSION, version="1", config=config, model=model)
    read = decode_message(encode_message(hello))
    assert isinstance(read, Hello)
    assert config_hash(read.config, read.model) == config_hash(config, model)


@given(st.binary(max_size=200))
def test_no_bytes_whatever_break_the_decoder(data: bytes) -> None:
    with contextlib.suppress(MessageError):
        decode_message(data)


def test_a_message_with_invalid_contents_is_no_message() -> None:
    body = encode_message(Abort([1])).replace(b"\x91\x01", b"\xa1x")
    with pytest.raises(MessageError, match="Abort"):
        decode_message(body)


def test_step_outputs_survive_packing() -> None:
    plain, rich = SampledToken(5), SampledToken(7, LogprobRow((7, 8), (-0.5, -1.5), (1, 2)))
    result = StepResult(
        request_ids=[10, 2**40, 12],
        token_ids=[[5, 5], [7], []],
        sampled=[[plain, plain], [rich], []],
        finish_reasons=[None, FinishReason.STOP, FinishReason.ERROR],
        stop_token_ids=[None, 7, None],
        num_cached_tokens=[0, 16, 3],
    )
    first, second, third = unpack_step(pack_step(result, STATS))
    assert (first.request_id, list(first.token_ids), first.finish_reason) == (10, [5, 5], None)
    assert first.logprobs is None
    assert (second.request_id, second.stop_token_id, second.num_cached_tokens) == (2**40, 7, 16)
    assert second.finish_reason is FinishReason.STOP
    assert second.logprobs is not None
    (row,) = second.logprobs
    assert (list(row.token_ids), list(row.logprobs), list(row.ranks)) == ([7, 8], [-0.5, -1.5], [1, 2])
    assert (list(third.token_ids), third.finish_reason) == ([], FinishReason.ERROR)
    assert [list(update.prompt_logprobs) for update in (first, second, third)] == [[], [], []]


def rows_of(rows: Sequence[LogprobRow] | None) -> list[tuple[list[int], list[float], list[int]]]:
    return [(list(row.token_ids), list(row.logprobs), list(row.ranks)) for row in rows or ()]


def test_several_tokens_and_prompt_logprobs_go_to_their_own_requests() -> None:
    rows = [LogprobRow((number, 9), (-0.5 * number, -0.25), (2, 1)) for number in range(1, 6)]
    result = StepResult(
        request_ids=[1, 2, 3],
        token_ids=[[1, 2, 3], [], [4]],
        sampled=[[SampledToken(n, rows[n - 1]) for n in (1, 2, 3)], [], [SampledToken(4)]],
        finish_reasons=[None, None, FinishReason.REPETITION],
        stop_token_ids=[None] * 3,
        num_cached_tokens=[0] * 3,
        prompt_logprobs=[[rows[4]], rows[:2], []],
    )
    first, second, third = unpack_step(pack_step(result, STATS))
    assert list(first.token_ids) == [1, 2, 3]
    assert rows_of(first.logprobs) == [([n, 9], [-0.5 * n, -0.25], [2, 1]) for n in (1, 2, 3)]
    assert rows_of(first.prompt_logprobs) == [([5, 9], [-2.5, -0.25], [2, 1])]
    assert (list(second.token_ids), second.logprobs) == ([], None)
    assert rows_of(second.prompt_logprobs) == [([n, 9], [-0.5 * n, -0.25], [2, 1]) for n in (1, 2)]
    assert (third.logprobs, list(third.prompt_logprobs)) == (None, [])
    assert third.finish_reason is FinishReason.REPETITION


def stream_pair() -> tuple[MessageStream, MessageStream]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    near, far = (MessageStream(trio.SocketStream(trio.socket.from_stdlib_socket(end))) for end in ends)
    return near, far


async def test_sending_needs_no_await_and_keeps_the_order() -> None:
    near, far = stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.run_writer)
        for number in range(100):
            near.send_nowait(Abort([number]))
        received = [await far.receive() for _ in range(100)]
        assert received == [Abort([number]) for number in range(100)]
        nursery.cancel_scope.cancel()
    near.close()
    far.close()


async def test_the_end_of_the_other_side_is_none_and_sending_to_it_is_harmless() -> None:
    near, far = stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.run_writer)
        far.close()
        assert await near.receive() is None
        near.send_nowait(Abort([1]))
        await wait_all_tasks_blocked()
        near.send_nowait(Abort([2]))
        with trio.fail_after(5):
            await near.flush()
        assert near.broken
        nursery.cancel_scope.cancel()
    near.close()


async def test_a_sender_that_is_far_ahead_waits_for_room() -> None:
    near, far = stream_pair()
    big = Abort(list(range(2**20, 2**20 + 600_000)))  # 3 MB each
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.run_writer)
        for _ in range(4):
            near.send_nowait(big)
        waited = trio.Event()

        async def wait_room() -> None:
            await near.wait_room()
            waited.set()

        nursery.start_soon(wait_room)
        await wait_all_tasks_blocked()
        assert not waited.is_set()
        assert [await far.receive() for _ in range(4)] == [big] * 4
        with trio.fail_after(5):
            await waited.wait()
        nursery.cancel_scope.cancel()
    near.close()
    far.close()


async def open_client() -> tuple[EngineCoreClient, MessageStream]:
    near, far = stream_pair()
    return EngineCoreClient(near, FakeEngineClient.ready), far


async def test_whoever_waits_for_a_call_hears_of_the_end() -> None:
    client, far = await open_client()
    failures: list[str] = []

    async def call() -> None:
        try:
            await client.call("ping")
        except ClosedError as error:
            failures.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        client.end(ClosedError("closed"))
    assert failures == ["closed"]
    with pytest.raises(ClosedError):
        client.add(make_add())
    client.abort([1])  # harmless
    far.close()
    client._stream.close()


async def test_a_core_that_does_not_read_is_sent_only_so_much() -> None:
    client, far = await open_client()
    big = attrs.evolve(make_add(), prompt_token_ids=bytes(2**20))
    accepted = 0
    with contextlib.suppress(OverloadedError):
        while accepted < 100:
            client.add(big)
            accepted += 1
    assert 0 < accepted < 100
    client.add_again(big)  # as do those that were let in before
    client.abort([3])  # always passes
    far.close()
    client._stream.close()


def test_columns_that_do_not_fit_together_are_no_message() -> None:
    token = SampledToken(7, LogprobRow((7, 8), (-0.5, -1.5), (1, 2)))
    result = StepResult(
        request_ids=[1],
        token_ids=[[7]],
        sampled=[[token]],
        finish_reasons=[None],
        stop_token_ids=[None],
        num_cached_tokens=[0],
        prompt_logprobs=[[LogprobRow((1,), (-1.0,), (1,))]],
    )
    step = pack_step(result, STATS)
    assert step.logprobs is not None
    assert step.prompt_logprobs is not None
    broken = [
        attrs.evolve(step, token_ids=b""),
        attrs.evolve(step, token_ids=b"abc"),
        attrs.evolve(step, num_tokens=struct.pack("i", -1)),
        attrs.evolve(step, finish_reasons=b"\xff"),
        attrs.evolve(step, logprobs=attrs.evolve(step.logprobs, widths=b"")),
        attrs.evolve(step, logprobs=attrs.evolve(step.logprobs, ranks=b"")),
        attrs.evolve(step, num_prompt_logprobs=b""),
        attrs.evolve(step, num_prompt_logprobs=struct.pack("i", 2)),
        attrs.evolve(step, prompt_logprobs=attrs.evolve(step.prompt_logprobs, token_ids=b"")),
    ]
    for outputs in broken:
        with pytest.raises(MessageError):
            list(unpack_step(outputs))


async def test_refusals_come_up_among_the_steps() -> None:
    client, far = await open_client()
    refused = Refused(request_id=1, message="the grammar is wrong", parameter="structured_outputs")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.run_writer)
        far.send_nowait(refused)
        far.send_nowait(pack_step(StepResult(), STATS))
        assert await client.receive() == refused
        assert isinstance(await client.receive(), StepOutputs)
        nursery.cancel_scope.cancel()
    far.close()
    client._stream.close()
