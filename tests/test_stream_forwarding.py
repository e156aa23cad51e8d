"""Outputs that go to the socket in the task that brings them: the same bytes, whatever comes in between."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fake_engine import STATS
from helpers_complaints import CHAT, COMPLETIONS, QUESTION, http_request, parse_events, until
from helpers_http import serving
from trioserve import SamplingParams
from trioserve.core.step_result import StepResult
from trioserve.errors import EngineDeadError, EngineGenerateError
from trioserve.frontend.channel import OutputChannel
from trioserve.link.columns import pack_step, unpack_step
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind
from trioserve.server import byte_streams
from trioserve.server.app import create_app
from trioserve.server.completions import CompletionChunks
from trioserve.server.keep_alive import KeepAliveSender
from trioserve.worker.batch import SampledToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio.testing import MockClock

    from fake_engine import FakeEngine
    from helpers_http import Client, Server
    from trioserve.link.messages import Add, StepOutputs
    from trioserve.outputs import RequestOutput

DELTAS = SamplingParams(max_tokens=100, output_kind=RequestOutputKind.DELTA)
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "stream": True, "max_tokens": 100},
    CHAT: {"messages": QUESTION, "stream": True, "max_tokens": 50},
}


def texts_of(body: str) -> list[str]:
    *events, done = parse_events(body)
    assert done == "[DONE]"
    choices = [event["choices"][0] for event in events]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
    return [text for text in texts if text]


# The channel


class Taken:
    """What a consumer that forwards was given; it wants no more after `limit`."""

    def __init__(self, limit: int = 100, error: Exception | None = None) -> None:
        self.texts: list[str] = []
        self._limit = limit
        self._error = error

    def __call__(self, output: RequestOutput) -> bool:
        if self._error is not None:
            raise self._error
        self.texts.append(output.outputs[0].text)
        return len(self.texts) < self._limit


def one_token_step(add: Add, text: str) -> StepOutputs:
    result = StepResult(
        request_ids=[add.request_id],
        token_ids=[[ord(text)]],
        sampled=[[SampledToken(ord(text))]],
        finish_reasons=[None],
        stop_token_ids=[None],
        num_cached_tokens=[0],
        prompt_logprobs=[()],
    )
    return pack_step(result, STATS)


async def submit(fake: FakeEngine) -> OutputChannel:
    return await fake.llm.submit("x", DELTAS, request_id="r")


async def test_outputs_are_delivered_as_they_come_and_the_end_is_taken(fake: FakeEngine) -> None:
    channel, taken = await submit(fake), Taken()
    (add,) = fake.client.added
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.forward, taken)
        for number, text in enumerate("abc"):
            await wait_all_tasks_blocked()
            fake.client.emit(add, text)
            await until(lambda number=number: len(taken.texts) == number + 1)
        fake.client.emit(add, "d", FinishReason.LENGTH)
    assert taken.texts == ["a", "b", "c"]
    assert (await channel.take()).outputs[0].text == "d"
    fake.llm.release(channel)


async def test_who_wants_no_more_is_given_no_more(fake: FakeEngine) -> None:
    channel, taken = await submit(fake), Taken(limit=1)
    (add,) = fake.client.added
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.forward, taken)
        await wait_all_tasks_blocked()
        for text in "abc":  # at once: it may not have run again yet
            fake.client.emit(add, text)
    await wait_all_tasks_blocked()
    assert taken.texts == ["a"]
    assert (await channel.take()).outputs[0].text == "bc"
    fake.llm.release(channel)


async def test_what_deliver_raises_is_the_consumers_and_nobody_elses(fake: FakeEngine) -> None:
    channel, other = await submit(fake), await submit(fake)
    first, second = fake.client.added
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.forward, Taken(error=KeyError("mine")))
        await wait_all_tasks_blocked()
        fake.client.emit_step([(first, "a", None, None), (second, "b", None, None)])
    with pytest.raises(KeyError, match="mine"):
        await channel.take()
    assert (await other.take()).outputs[0].text == "b"
    for each in (channel, other):
        fake.llm.release(each)


async def test_the_cancelled_are_given_nothing_and_lose_nothing(fake: FakeEngine) -> None:
    channel, taken = await submit(fake), Taken()
    (add,) = fake.client.added
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.forward, taken)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        channel.completions[0].push(next(unpack_step(one_token_step(add, "a"))))
        channel.notify()  # before it has run again
        assert taken.texts == []
    assert (await channel.take()).outputs[0].text == "a"
    fake.llm.release(channel)


async def test_the_engines_death_ends_forwarding(fake: FakeEngine) -> None:
    channel, taken = await submit(fake), Taken()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.forward, taken)
        await wait_all_tasks_blocked()
        fake.client.die()
    with pytest.raises(EngineDeadError):
        await channel.take()
    fake.llm.release(channel)


# The sender


async def one_frame() -> AsyncIterator[bytes]:
    yield b"1"


async def test_what_was_sent_in_part_is_completed_before_anything_else(autojump_clock: MockClock) -> None:
    sent: list[bytes] = []

    async def send(part: bytes) -> None:
        sent.append(part)

    async def send_rest() -> None:
        await trio.sleep(100)  # longer than it takes for a comment to be due
        sent.append(b"cd")

    def send_now(part: bytes) -> Callable[[], Any]:
        sent.append(part[:2])
        return send_rest

    async def forward(take: Callable[[bytes], bool]) -> None:
        await trio.sleep(1)
        assert not take(b"abcd")

    sender = KeepAliveSender(send, 10, send_now)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.watch, trio.sleep_forever)
        await sender.send_all(one_frame(), forward)
        nursery.cancel_scope.cancel()
    assert sent == [b"1", b"ab", b"cd"]


async def test_a_frame_that_comes_during_a_comment_follows_it(autojump_clock: MockClock) -> None:
    sent: list[bytes] = []

    async def send(part: bytes) -> None:
        await trio.sleep(1)
        sent.append(part)

    async def forward(take: Callable[[bytes], bool]) -> None:
        await trio.sleep(10.5)
        assert not take(b"2")

    sender = KeepAliveSender(send, 10, lambda part: pytest.fail(f"{part!r} was sent into a comment"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.watch, trio.sleep_forever)
        await sender.send_all(one_frame(), forward)
        nursery.cancel_scope.cancel()
    assert sent == [b"1", b": keep-alive\n\n", b"2"]


# Through the server


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("portions", [(10**9,), (7,), (0,), (0, 7, 10**9)], ids=str)
async def test_the_stream_is_the_same_however_the_kernel_takes_it(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, portions: tuple[int, ...]
) -> None:
    portion = itertools.cycle(portions)
    write_now = byte_streams.write_now
    monkeypatch.setattr(byte_streams, "write_now", lambda sock, data: write_now(sock, data[: next(portion)]))
    async with serving(create_app(fake.llm)) as server:
        client = await server.connect()
        await client.send(http_request(path, ASKED[path], "connection: close"))
        await until(lambda: fake.client.added)
        (add,) = fake.client.added
        for text in ("a", "b\n", '"', "é", "\\"):
            fake.client.emit(add, text)
            await wait_all_tasks_blocked(0.001)
        fake.client.emit(add, "z", FinishReason.LENGTH)
        body = (await client.read_reply()).body.decode()
    assert texts_of(body) == ["a", "b\n", '"', "é", "\\", "z"]


async def test_no_task_is_woken_for_an_output(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    num_taken = 0
    take = OutputChannel.take

    async def counted_take(channel: OutputChannel) -> RequestOutput:
        nonlocal num_taken
        num_taken += 1
        return await take(channel)

    monkeypatch.setattr(OutputChannel, "take", counted_take)
    async with serving(create_app(fake.llm)) as server:
        client = await server.connect()
        await client.send(http_request(COMPLETIONS, ASKED[COMPLETIONS], "connection: close"))
        await until(lambda: fake.client.added)
        emit = partial(fake.client.emit, fake.client.added[0])
        for text in "abcdefgh":
            emit(text)
            await wait_all_tasks_blocked(0.001)
        emit("z", FinishReason.LENGTH)
        await client.read_reply()
    assert num_taken == 2  # the first and the last


async def test_a_client_that_leaves_ends_a_stream_that_is_forwarded(fake: FakeEngine) -> None:
    async with serving(create_app(fake.llm)) as server:
        client = await server.connect()
        await client.send(http_request(COMPLETIONS, ASKED[COMPLETIONS]))
        await until(lambda: fake.client.added)
        (add,) = fake.client.added
        fake.client.emit(add, "a")
        await client.read_head()
        await client.read_chunk()
        client.close()
        fake.client.emit(add, "b")
        await until(lambda: fake.client.aborted)
    assert fake.client.aborted == [add.request_id]


async def begin_stream(fake: FakeEngine, server: Server) -> Client:
    """A completion whose first output has been read; then its task waits in `forward`."""
    client = await server.connect()
    num_before = len(fake.client.added)
    await client.send(http_request(COMPLETIONS, ASKED[COMPLETIONS], "connection: close"))
    await until(lambda: len(fake.client.added) > num_before)
    fake.client.emit(fake.client.added[-1], "a")
    await client.read_head()
    assert b'"a"' in await client.read_chunk()
    return client


async def rest_of(client: Client) -> list[Any]:
    body = b""
    while chunk := await client.read_chunk():
        body += chunk
    return parse_events(body.decode())


async def test_what_a_writer_raises_ends_its_own_stream_alone(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CompletionChunks.write

    def write_or_fail(writer: CompletionChunks, prompt_index: int, output: RequestOutput) -> bytes:
        if "!" in output.outputs[0].text:
            raise EngineGenerateError("This cannot be written.")
        return write(writer, prompt_index, output)

    monkeypatch.setattr(CompletionChunks, "write", write_or_fail)
    async with serving(create_app(fake.llm)) as server:
        clients = [await begin_stream(fake, server) for _ in range(2)]
        first, second = fake.client.added
        fake.client.emit_step([(first, "!", None, None), (second, "b", None, None)])
        error, done = await rest_of(clients[0])
        fake.client.emit(second, "c", FinishReason.LENGTH)
        *events, _ = await rest_of(clients[1])
    assert error["error"]["message"] == "The request failed in the engine."
    assert done == "[DONE]"
    assert [event["choices"][0]["text"] for event in events] == ["b", "c"]
    assert fake.client.aborted == [first.request_id]


async def test_who_does_not_read_is_dropped_and_holds_up_nobody(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_now = byte_streams.write_now
    full: set[int] = set()  # ports of clients whose connections take nothing more

    def write_if_not_full(sock: trio.socket.SocketType, data: bytes) -> int:
        return 0 if sock.getpeername()[1] in full else write_now(sock, data)

    async def send_never(stream: byte_streams.PlainBytes, data: memoryview) -> int:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(byte_streams, "write_now", write_if_not_full)
    monkeypatch.setattr(byte_streams.PlainBytes, "send", send_never)
    async with serving(create_app(fake.llm), write_timeout=0.1) as server:
        clients = [await begin_stream(fake, server) for _ in range(2)]
        full.add(clients[0].socket.getsockname()[1])
        first, second = fake.client.added
        for text in "bcd":
            fake.client.emit_step([(first, text, None, None), (second, text, None, None)])
            assert f'"{text}"'.encode() in await clients[1].read_chunk()
        await until(lambda: fake.client.aborted)
        fake.client.emit(second, "e", FinishReason.LENGTH)
        event, _ = await rest_of(clients[1])
    assert event["choices"][0]["text"] == "e"
    assert fake.client.aborted == [first.request_id]


async def test_a_connection_that_breaks_as_it_is_written_to_is_no_error(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_now = byte_streams.write_now
    broken: set[int] = set()  # ports of clients

    def write_unless_broken(sock: trio.socket.SocketType, data: bytes) -> int:
        if sock.getpeername()[1] in broken:
            raise ConnectionResetError
        return write_now(sock, data)

    monkeypatch.setattr(byte_streams, "write_now", write_unless_broken)
    async with serving(create_app(fake.llm)) as server:
        clients = [await begin_stream(fake, server) for _ in range(2)]
        broken.add(clients[0].socket.getsockname()[1])
        first, second = fake.client.added
        fake.client.emit_step([(first, "b", None, None), (second, "b", FinishReason.LENGTH, None)])
        assert await clients[0].read_to_end() == b""
        event, _ = await rest_of(clients[1])
        await until(lambda: fake.client.aborted)
    assert event["choices"][0]["text"] == "b"
    assert fake.client.aborted == [first.request_id]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_the_engines_death_is_told_in_a_stream_that_is_forwarded(fake: FakeEngine) -> None:
    async with serving(create_app(fake.llm)) as server:
        client = await begin_stream(fake, server)
        fake.client.emit(fake.client.added[0], "b")
        fake.client.die()
        event, error, done = await rest_of(client)
    assert event["choices"][0]["text"] == "b"
    assert error["error"]["code"] == "engine_dead"
    assert done == "[DONE]"


async def test_http_1_0_gets_the_same_events_unframed(fake: FakeEngine) -> None:
    async with serving(create_app(fake.llm)) as server:
        client = await server.connect()
        await client.send(http_request(COMPLETIONS, ASKED[COMPLETIONS]).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        await until(lambda: fake.client.added)
        (add,) = fake.client.added
        for text in "abc":
            fake.client.emit(add, text)
            await wait_all_tasks_blocked(0.001)
        fake.client.emit(add, "z", FinishReason.LENGTH)
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert texts_of(body.decode()) == ["a", "b", "c", "z"]
