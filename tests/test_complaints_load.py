"""Complaint 28, and clients of HTTP/2 that never open their window."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import wait_all_tasks_blocked

from fake_engine import FakeEngine, open_fake_llm
from helpers_complaints import (
    COMPLETIONS,
    GREEDY,
    Caller,
    ask_together,
    http_request,
    parse_events,
    text_of,
    until,
)
from helpers_http import Server, get, serving
from helpers_tls import Authority, Http2Client
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from served import ServedModel

HUGE = 200_000
"""Characters."""


# Complaint 28: tokenizing a huge prompt stalls neither /health nor the streams


@contextmanager
def tokenizing_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Tokenizing a huge text waits until the body ends; the semaphore counts those that do."""
    begun, release = threading.Semaphore(0), threading.Event()
    was_released: list[bool] = []
    encode = Tokenizer.encode

    def encode_slowly(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if len(text) < 10_000:
            return encode(self, text, **options)
        begun.release()
        was_released.append(release.wait(10))  # the body never ends if it waits for this
        return [1, 2, 3]

    monkeypatch.setattr(Tokenizer, "encode", encode_slowly)
    try:
        yield begun
    finally:
        release.set()
    assert all(was_released)


async def wait_begun(begun: threading.Semaphore) -> None:
    with trio.fail_after(10):
        while not begun.acquire(blocking=False):  # noqa: ASYNC110 - it comes from a thread
            await trio.sleep(0.001)


async def test_complaint_28_health_and_streams_go_on_while_a_huge_prompt_is_tokenized(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(create_app(fake.llm)) as server:
        # As long as the context may be taken for before it is tokenized: 128 characters per token.
        huge = {"prompt": "a" * 16_000, "max_tokens": 5}
        with tokenizing_held(monkeypatch) as begun:
            stream = await server.connect()
            await stream.send(http_request(COMPLETIONS, {"prompt": "Hi", "stream": True}))
            await until(lambda: fake.client.added)
            slow = await server.connect()
            await slow.send(http_request(COMPLETIONS, huge))
            await wait_begun(begun)
            await check_that_all_goes_on(fake, server, stream)
            assert len(fake.client.added) == 2
        await until(lambda: len(fake.client.added) >= 3)
        fake.client.emit(fake.client.added[2], "ok", FinishReason.LENGTH)
        reply = await slow.read_reply()
        assert json.loads(reply.body)["choices"][0]["text"] == "ok"


async def check_that_all_goes_on(fake: FakeEngine, server: Server, stream: Any) -> None:
    """Health is answered, the stream gets each token as it comes, and a new request is taken."""
    first = fake.client.added[0]
    fake.client.emit(first, "a")
    await stream.read_head()
    for letter in "bcd":
        assert await stream.read_chunk()
        assert (await server.ask(get("/health"))).status == 200
        fake.client.emit(first, letter)
    fake.client.emit(first, "e", FinishReason.LENGTH)
    asking = await server.connect()
    await asking.send(http_request(COMPLETIONS, {"prompt": "you"}))
    await until(lambda: len(fake.client.added) >= 2)
    fake.client.emit(fake.client.added[1], "x", FinishReason.LENGTH)
    assert (await asking.read_reply()).status == 200


def test_complaint_28_a_huge_prompt_beside_streams_and_every_answer_is_right(server: ServedModel) -> None:
    prompts = [f"Chapter {number}. Once upon a time" for number in range(8)]
    body = {**GREEDY, "max_tokens": 8, "ignore_eos": True}
    (alone,) = ask_together(server, (COMPLETIONS, {**body, "prompt": prompts}))
    expected = [choice["text"] for choice in alone["choices"]]
    streams = [Caller(server, COMPLETIONS, {**body, "prompt": prompt, "stream": True}) for prompt in prompts]
    for stream in streams:
        stream.read_until(b"data: ")
    huge = [Caller(server, COMPLETIONS, {**body, "prompt": "wonder " * (HUGE // 7)}) for _ in range(3)]
    assert server.request("GET", "/health")[0] == 200
    for number, stream in enumerate(streams):
        status, text = stream.read_to_end()
        assert (status, text_of(parse_events(text))) == (200, expected[number])
    for caller in huge:
        status, text = caller.read_to_end()
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")
    server.wait_until_idle()


# Also: a client of HTTP/2 that never opens its window


class Counted:
    """An application, and how many bytes of its responses it has handed over, or is about to."""

    def __init__(self, app: Any) -> None:
        self.num_bytes = 0
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def count_and_send(message: Any) -> None:
            self.num_bytes += len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, count_and_send)


async def test_complaint_31_a_window_that_never_opens_buffers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine generates stays with it, merged into one output; the neighbours go on."""
    authority = Authority(tmp_path)
    async with open_fake_llm(tmp_path, monkeypatch) as fake:
        app = Counted(create_app(fake.llm))
        async with serving(app, certificates=authority.certificates(http2=True)) as server:
            shut = await Http2Client.connect(server, authority, window=0)
            streams = [await begin_stream(shut) for _ in range(20)]
            await until(lambda: len(fake.client.added) >= 20)
            adds = list(fake.client.added)
            fake.client.emit_step([(add, "a", None, None) for add in adds])
            await wait_all_tasks_blocked(0.01)
            held = app.num_bytes
            assert held > 0
            for _ in range(98):
                fake.client.emit_step([(add, "b", None, None) for add in adds])
                await wait_all_tasks_blocked()
            assert app.num_bytes == held
            fake.client.emit_step([(add, "c", FinishReason.LENGTH, None) for add in adds])
            shut.h2.increment_flow_control_window(2**20)
            for stream_id in streams:
                shut.h2.increment_flow_control_window(2**16, stream_id)
            await shut.flush()
            for stream_id in streams:  # nothing was lost meanwhile
                events = parse_events((await shut.read_reply(stream_id)).body.decode())
                assert text_of(events) == "a" + 98 * "b" + "c"
                assert len(events) < 10, "it was merged"


async def test_complaint_31_a_client_that_leaves_with_its_window_shut_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    async with (
        open_fake_llm(tmp_path, monkeypatch) as fake,
        serving(create_app(fake.llm), certificates=authority.certificates(http2=True)) as server,
    ):
        shut = await Http2Client.connect(server, authority, window=0)
        await begin_stream(shut)
        await until(lambda: fake.client.added)
        (add,) = fake.client.added
        fake.client.emit(add, "a")
        await wait_all_tasks_blocked(0.01)
        shut.client.close()
        await until(lambda: not fake.llm.num_open_requests)
        assert fake.client.aborted == [add.request_id]


async def begin_stream(client: Http2Client) -> int:
    stream_id = await client.begin(COMPLETIONS, method="POST", end=False, content_type="application/json")
    body = {"prompt": "Hi", "max_tokens": 100, "stream": True}
    await client.send_body(stream_id, json.dumps(body).encode())
    return stream_id
