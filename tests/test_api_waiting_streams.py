"""Streams that have to wait for tokens, and how streams end."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_api import Exchange
from helpers_http import serving
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind, SamplingParams
from trioserve.server.app import create_app
from trioserve.server.generation import Generation, open_outputs
from trioserve.server.keep_alive import KeepAliveSender
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from openai.types.chat import ChatCompletionChunk
    from trio.testing import MockClock

    from fake_engine import FakeEngine

COMMENT = ": keep-alive"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def begin(fake: FakeEngine, interval: float = 10, path: str = COMPLETIONS, **fields: Any) -> Exchange:
    app = create_app(fake.llm, ServerArgs(sse_keep_alive_interval=interval))
    body = json.dumps(HI | fields).encode()
    return Exchange(app, "POST", path, body, {"content-type": "application/json"})


def events_of(exchange: Exchange) -> list[Any]:
    """Decoded events, "[DONE]" and comments, in their order."""
    frames = exchange.reply.body.decode().split("\n\n")
    assert frames.pop() == ""
    texts = [frame.removeprefix("data: ") for frame in frames]
    return [text if text in {"[DONE]", COMMENT} else json.loads(text) for text in texts]


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["text"] for choice in choices)


def check_end(events: list[Any], code: str) -> None:
    """One error, and then the end."""
    *before, error, done = events
    assert error["error"]["code"] == code
    assert done == "[DONE]"
    assert "[DONE]" not in before
    assert not any(isinstance(event, dict) and "error" in event for event in before)


# Complaint 29: a long queue or prefill


async def test_headers_and_comments_go_out_before_the_first_token(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    exchange = begin(fake)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(9.9)
        assert not exchange._sent
        await trio.sleep(0.2)
        assert exchange.reply.status == 200
        assert exchange.reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        # Proxies and browsers are to pass everything on at once.
        assert exchange.reply.headers["cache-control"] == "no-cache"
        assert exchange.reply.headers["x-accel-buffering"] == "no"
        await trio.sleep(30)
        assert events_of(exchange) == [COMMENT] * 4
        fake.client.emit(fake.client.added[0], "ab")
        await trio.sleep(25)
        fake.client.emit(fake.client.added[0], "c", FinishReason.LENGTH)
    events = events_of(exchange)
    assert events[:4] == [COMMENT] * 4
    assert events[5:7] == [COMMENT] * 2, "also in the middle of a stream, after each silence of ten seconds"
    assert text_of(events) == "abc"
    assert (events.count(COMMENT), events[-1]) == (6, "[DONE]")


async def test_tokens_that_come_in_time_need_no_comment(fake: FakeEngine, autojump_clock: MockClock) -> None:
    exchange = begin(fake)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        for letter in "abcd":
            await trio.sleep(9)
            fake.client.emit(fake.client.added[0], letter)
        await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], "e", FinishReason.LENGTH)
    assert COMMENT not in events_of(exchange)
    assert text_of(events_of(exchange)) == "abcde"


@pytest.mark.parametrize("num_steps", range(12))
async def test_a_token_at_the_moment_of_a_comment_is_not_lost(
    fake: FakeEngine, autojump_clock: MockClock, num_steps: int
) -> None:
    exchange = begin(fake, prompt=["Hi", "you"])

    async def write(letters: str, offset: int) -> None:
        for letter in letters:
            await trio.sleep_until(trio.current_time() // 10 * 10 + 10)
            for _ in range(num_steps + offset):
                await trio.lowlevel.checkpoint()
            fake.client.emit(fake.client.added[offset], letter)
        fake.client.emit(fake.client.added[offset], "!", FinishReason.LENGTH)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, "abcdef", 0)
        nursery.start_soon(write, "uvwxyz", 1)
        nursery.start_soon(exchange.run)
    events = events_of(exchange)
    choices = [event["choices"][0] for event in events if isinstance(event, dict)]
    for index, expected in ((0, "abcdef!"), (1, "uvwxyz!")):
        assert "".join(choice["text"] for choice in choices if choice["index"] == index) == expected
    assert events[-1] == "[DONE]"


async def test_0_means_never(fake: FakeEngine, autojump_clock: MockClock) -> None:
    exchange = begin(fake, interval=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(1000)
        assert not exchange._sent
        fake.client.emit(fake.client.added[0], "a")
        await trio.sleep(1000)
        fake.client.emit(fake.client.added[0], "b", FinishReason.LENGTH)
    assert COMMENT not in events_of(exchange)


async def test_a_whole_reply_waits_without_a_word(fake: FakeEngine, autojump_clock: MockClock) -> None:
    exchange = begin(fake, stream=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(1000)
        assert not exchange._sent
        fake.client.emit(fake.client.added[0], "a", FinishReason.LENGTH)
    assert exchange.reply.json["choices"][0]["text"] == "a"


async def test_what_is_refused_at_once_is_a_status(fake: FakeEngine, autojump_clock: MockClock) -> None:
    for fields, status in (
        ({"model": "other"}, 404),
        ({"max_tokens": -1}, 400),
        ({"prompt": "x" * 500}, 400),
    ):
        exchange = begin(fake, **fields)
        await exchange.run()
        assert exchange.reply.status == status


async def test_an_error_after_the_headers_is_an_event_that_names_the_field(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    exchange = begin(fake, response_format={"type": "json_object"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(11)
        fake.client.refuse(
            fake.client.added[0], "structured_outputs cannot be compiled.", "structured_outputs"
        )
    comment, error, done = events_of(exchange)
    assert (comment, done) == (COMMENT, "[DONE]")
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["param"] == "response_format"
    assert error["error"]["message"] == "response_format cannot be compiled."


async def test_a_waiting_client_that_leaves_frees_the_engine(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    exchange = begin(fake, n=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(35)
        exchange.leave()
    assert sorted(fake.client.aborted) == [add.request_id for add in fake.client.added]


async def test_openais_client_passes_over_comments(fake: FakeEngine) -> None:
    app = create_app(fake.llm, ServerArgs(sse_keep_alive_interval=0.02))
    comments = _Counter(app)

    def ask(port: int) -> list[ChatCompletionChunk]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            question: Any = [{"role": "user", "content": "Hi"}]
            return list(client.chat.completions.create(model="fake", messages=question, stream=True))

    async def write() -> None:
        await comments.wait(2)
        fake.client.emit(fake.client.added[0], "ab")
        await comments.wait(4)
        fake.client.emit(fake.client.added[0], "c", FinishReason.LENGTH)

    async with serving(comments) as server, trio.open_nursery() as nursery:
        nursery.start_soon(write)
        chunks = await trio.to_thread.run_sync(ask, server.address[1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "length"


class _Counter:
    """An application around another one, that counts the comments of a response."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._number = 0
        self._arrival = trio.lowlevel.ParkingLot()

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Any]) -> None:
        async def count_and_send(message: Any) -> None:
            await send(message)
            if message.get("body") == b": keep-alive\n\n":
                self._number += 1
                self._arrival.unpark_all()

        await self._app(scope, receive, count_and_send)

    async def wait(self, number: int) -> None:
        with trio.fail_after(10):
            while self._number < number:
                await self._arrival.park()


# The sender by itself


class SlowTransport:
    """Takes its time for each part, and minds being given two at a time."""

    def __init__(self, seconds: float = 1) -> None:
        self.sent: list[bytes] = []
        self._seconds = seconds
        self._busy = False

    async def send(self, part: bytes) -> None:
        assert not self._busy
        self._busy = True
        try:
            await trio.sleep(self._seconds)
        finally:
            self._busy = False
        self.sent.append(part)


async def test_a_frame_waits_for_the_comment_before_it(autojump_clock: MockClock) -> None:
    transport = SlowTransport()

    async def frames() -> Any:
        yield b"1"
        await trio.sleep(10.5)  # the comment is under way
        yield b"2"
        await trio.sleep(10.5)  # the end comes while another one is

    sender = KeepAliveSender(transport.send, 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.watch, trio.sleep_forever)
        await sender.send_all(frames())
        nursery.cancel_scope.cancel()
    assert transport.sent == [b"1", b": keep-alive\n\n", b"2", b": keep-alive\n\n"]
    assert trio.current_time() == pytest.approx(1 + 11 + 1 + 11)


async def test_a_frame_that_takes_long_is_no_silence(autojump_clock: MockClock) -> None:
    transport = SlowTransport(25)

    async def frames() -> Any:
        yield b"1"
        await trio.sleep(12)  # a comment is under way
        yield b"2"
        yield b"3"

    sender = KeepAliveSender(transport.send, 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.watch, trio.sleep_forever)
        await sender.send_all(frames())
        nursery.cancel_scope.cancel()
    assert transport.sent == [b"1", b": keep-alive\n\n", b"2", b"3"]


async def test_no_comment_follows_the_last_frame(autojump_clock: MockClock) -> None:
    transport = SlowTransport()

    async def frames() -> Any:
        yield b"1"

    sender = KeepAliveSender(transport.send, 10)
    for end, frame in ((partial(sender.send_all, frames()), b"1"), (partial(sender.send_last, b"2"), b"2")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.watch, trio.sleep_forever)
            await end()
            assert transport.sent[-1] == frame
            await trio.sleep(100)  # what ends the message is not through for so long
            assert transport.sent[-1] == frame
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["whole", "deadline", "death"])
async def test_an_end_that_is_not_through_is_followed_by_nothing(
    fake: FakeEngine, autojump_clock: MockClock, how: str
) -> None:
    exchange = begin(fake, timeout=5)
    reads = trio.Event()
    send = exchange._send

    async def send_slowly(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            await reads.wait()
        await send(message)

    exchange._send = send_slowly  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], "a", FinishReason.LENGTH if how == "whole" else None)
        await wait_all_tasks_blocked()
        if how == "death":
            fake.client.die()
        await trio.sleep(100)
        reads.set()
    assert events_of(exchange)[-1] == "[DONE]"
    assert COMMENT not in events_of(exchange)


# Nothing is lost between the engine and the stream


async def test_waiting_for_several_prompts_can_be_cancelled_at_any_time(fake: FakeEngine) -> None:
    params = SamplingParams(max_tokens=100, output_kind=RequestOutputKind.DELTA)
    generation = Generation(prompts=["a", "b", "c"], request_ids=["0", "1", "2"], params=params)
    texts = ["", "", ""]
    async with AsyncExitStack() as stack:
        outputs = await open_outputs(fake.llm, generation, stack)
        num_running = 3
        for step in range(1000):
            if step < 60:
                finish = FinishReason.LENGTH if step >= 57 else None
                fake.client.emit(fake.client.added[step % 3], chr(ord("a") + step % 26), finish)
            with cancelled_at(step % 7):
                index, output = await outputs.next()
                texts[index] += output.outputs[0].text
                num_running -= output.finished
            if not num_running:
                break
    assert texts == ["".join(chr(ord("a") + step % 26) for step in range(first, 60, 3)) for first in range(3)]
    assert not fake.client.aborted


@contextmanager
def cancelled_at(step: int) -> Iterator[None]:
    """Cancels before that step of any task (0: before the first checkpoint)."""
    scope = trio.CancelScope()

    class CancelAtStep(trio.abc.Instrument):
        left = step

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.left -= 1
            if self.left <= 0:
                scope.cancel()

    instrument = CancelAtStep()
    trio.lowlevel.add_instrument(instrument)
    try:
        with scope:
            if step == 0:
                scope.cancel()
            yield
    finally:
        trio.lowlevel.remove_instrument(instrument)


# Complaints 17, 18 and 26: how streams end

SHAPES = pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"n": 2}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"n": 2}),
        (COMPLETIONS, {"prompt": ["Hi", "you"]}),
    ],
)
USAGE = {"stream_options": {"include_usage": True}}


@SHAPES
async def test_the_usage_comes_once_before_the_end(
    fake: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    exchange = begin(fake, path=path, **fields, **USAGE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        for letter, finish in (("a", None), ("b", None), ("c", FinishReason.LENGTH)):
            for add in fake.client.added:
                fake.client.emit(add, letter, finish)
            await wait_all_tasks_blocked()
    *chunks, usage, done = events_of(exchange)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3 * len(fake.client.added)


@SHAPES
@pytest.mark.parametrize("how", ["death", "abort", "shutdown"])
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_stream_that_is_cut_ends_in_one_error(
    fake: FakeEngine,
    autojump_clock: MockClock,
    path: str,
    fields: dict[str, Any],
    how: str,
    num_tokens: int,
) -> None:
    exchange = begin(fake, path=path, **fields, **USAGE, request_id="mine")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        for add in fake.client.added[: 1 if num_tokens else 0]:
            fake.client.emit(add, "a")
        await trio.sleep(0 if num_tokens else 11)
        await wait_all_tasks_blocked()
        match how:
            case "death":
                fake.client.die()
            case "abort":
                fake.llm.abort(["chatcmpl-mine", "cmpl-mine-0", "cmpl-mine-1"])
            case "shutdown":
                exchange._app.end_requests(trio.current_time())
    events = events_of(exchange)
    assert exchange.reply.status == 200
    code = {"death": "engine_dead", "abort": "aborted", "shutdown": "shutting_down"}[how]
    check_end(events, code)
    assert all(event.get("usage") is None for event in events if isinstance(event, dict))


@SHAPES
@pytest.mark.parametrize(("how", "status"), [("death", 500), ("abort", 503)])
async def test_before_the_first_token_it_is_a_status(
    fake: FakeEngine, path: str, fields: dict[str, Any], how: str, status: int
) -> None:
    exchange = begin(fake, path=path, **fields, request_id="mine")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        if how == "death":
            fake.client.die()
        else:
            fake.llm.abort(["chatcmpl-mine", "cmpl-mine-0", "cmpl-mine-1"])
    assert exchange.reply.status == status
