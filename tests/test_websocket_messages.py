"""Frames to messages, and what breaks the rules: cases of the Autobahn test suite that matter here."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from wsproto.events import CloseConnection, Ping, Pong

from helpers_http import serving
from helpers_websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    WebsocketProbe,
    echoes,
    frame,
    open_websocket,
)

WORD = "κόσμε".encode()


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([frame(TEXT, b"a" * 125)], "a" * 125),
        ([frame(TEXT, b"a" * 126)], "a" * 126),
        ([frame(TEXT, b"a" * 65535)], "a" * 65535),
        ([frame(BINARY, b"a" * 65536)], b"a" * 65536),
        ([frame(TEXT)], ""),
        ([frame(TEXT, b"a", fin=False), frame(CONTINUATION, b"b")], "ab"),
        ([frame(TEXT, fin=False), frame(CONTINUATION, fin=False), frame(CONTINUATION)], ""),
        ([frame(TEXT, WORD[:3], fin=False), frame(CONTINUATION, WORD[3:])], WORD.decode()),
        ([frame(BINARY, b"\xff", fin=False)] + [frame(CONTINUATION, b"\xfe", fin=False)] * 500
         + [frame(CONTINUATION)], b"\xff" + b"\xfe" * 500),
        ([bytes([byte]) for byte in frame(TEXT, b"a")], "a"),
    ],
)  # fmt: skip
async def test_a_message_comes_whole(frames: list[bytes], message: str | bytes) -> None:
    async with serving(WebsocketProbe().app) as server:
        client = await echoes(server, frames)
        assert await client.message() == message
        await client.text("and on")
        assert await client.message() == "and on"


async def test_a_ping_between_the_parts_of_a_message() -> None:
    async with serving(WebsocketProbe().app) as server:
        client = await echoes(server, [frame(TEXT, b"a", fin=False), frame(PING, b"p" * 125)])
        assert await client.next() == Pong(payload=b"p" * 125)
        await client.send(frame(PONG, b"unasked") + frame(CONTINUATION, b"b"))
        assert await client.message() == "ab"


async def test_pings_are_answered_in_order() -> None:
    async with serving(WebsocketProbe().app) as server:
        client = await echoes(server, [b"".join(frame(PING, b"%d" % n) for n in range(10))])
        for n in range(10):
            assert await client.next() == Pong(payload=b"%d" % n)


BROKEN = {
    "unknown opcode": (frame(3), 1002),
    "unknown control opcode": (frame(11), 1002),
    "reserved bit": (frame(TEXT, b"a", reserved=4), 1002),
    "reserved bit of a ping": (frame(PING, reserved=1), 1002),
    "no mask": (frame(TEXT, b"a", masked=False), 1002),
    "ping too long": (frame(PING, b"a" * 126), 1002),
    "ping in parts": (frame(PING, fin=False), 1002),
    "nothing to continue": (frame(CONTINUATION, b"a"), 1002),
    "two messages at once": (frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), 1002),
    "length not minimal": (b"\x81\xfe\x00\x05" + b"\0\0\0\0hello", 1002),
    "length of 64 bits": (b"\x82\xff" + b"\xff" * 8 + b"\0\0\0\0", 1002),
    "close of one byte": (frame(CLOSE, b"\x03"), 1002),
    "close with a code that is not sent": (frame(CLOSE, b"\x03\xed"), 1002),
    "close with an unknown code": (frame(CLOSE, b"\x00\x00"), 1002),
    "close with a reason that is no text": (frame(CLOSE, b"\x03\xe8\xff"), 1007),
    "no text": (frame(TEXT, b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce\xb5\xed\xa0\x80"), 1007),
    "no text, and not whole": (frame(TEXT, b"\xff", fin=False), 1007),
    "text that ends in a character": (frame(TEXT, WORD[:3]), 1007),
    "too long": (frame(BINARY, bytes(1001)), 1009),
    "too long together": (frame(TEXT, b"a" * 600, fin=False) + frame(CONTINUATION, b"a" * 600), 1009),
    "too long in UTF-8": (frame(TEXT, "ü".encode() * 600), 1009),
    "says that it is too long": (frame(BINARY, bytes(1500), length=2**62), 1009),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_breaks_the_rules_ends_the_connection(name: str) -> None:
    data, code = BROKEN[name]
    probe = WebsocketProbe()
    async with serving(probe.app, max_body_size=1000) as server:
        neighbour = await open_websocket(server, "/echo")
        client = await open_websocket(server, "/echo")
        await client.send(data + frame(TEXT, b"more"))
        assert (await client.closing())[0] == code
        await probe.wait_left()
        await neighbour.text("still here")
        assert await neighbour.message() == "still here"


@pytest.mark.parametrize(
    ("payload", "code"), [(b"", 1005), (b"\x03\xe8bye", 1000), (b"\x03\xe9", 1001), (b"\x0b\xb8", 3000)]
)
async def test_a_close_is_answered_with_its_code(payload: bytes, code: int) -> None:
    probe = WebsocketProbe()
    async with serving(probe.app) as server:
        client = await echoes(server, [frame(CLOSE, payload) + frame(TEXT, b"after")])
        answer, reason = await client.closing()
        assert (answer, reason) == (code, payload[2:].decode())
        await probe.wait_left()


async def test_small_frames_let_others_run() -> None:
    """64 KiB of the smallest frames take a tenth of a second: a neighbour need not wait for all of it."""
    probe = WebsocketProbe()
    async with serving(probe.app) as server:
        neighbour = await open_websocket(server, "/echo")
        client = await open_websocket(server, "/wait")
        turns = 0

        async def flood() -> None:
            await client.send((frame(TEXT, fin=False) + frame(CONTINUATION)) * 20_000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            for turns in range(1, 11):  # noqa: B007 - counts
                await neighbour.text("turn")
                assert await neighbour.message() == "turn"
            nursery.cancel_scope.cancel()
        assert turns == 10


async def test_the_application_closes() -> None:
    async with serving(WebsocketProbe().app) as server:
        client = await open_websocket(server, "/return")
        assert await client.message() == "bye"
        assert await client.closing() == (1000, "")


async def test_the_application_fails() -> None:
    async with serving(WebsocketProbe().app) as server:
        client = await open_websocket(server, "/fail")
        assert (await client.closing())[0] == 1011


async def test_an_application_that_returns_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "websocket.accept"})  # type: ignore[operator]

    async with serving(app) as server:  # type: ignore[arg-type]
        client = await open_websocket(server, "/")
        assert (await client.closing())[0] == 1011


async def test_a_client_that_is_silent_is_asked_and_then_dropped(autojump_clock: object) -> None:
    probe = WebsocketProbe()
    async with serving(
        probe.app, websocket_ping_interval=4.0, websocket_ping_timeout=3.0, keep_alive_timeout=1.0
    ) as server:
        client = await open_websocket(server, "/wait")
        for _ in range(2):
            begun = trio.current_time()
            assert isinstance(await client.next(), Ping)
            assert trio.current_time() - begun == pytest.approx(4.0)
            await client.send(frame(PONG))
        assert isinstance(await client.next(), Ping)
        begun = trio.current_time()
        closing = await client.next()
        assert isinstance(closing, CloseConnection)
        assert (closing.code, trio.current_time() - begun) == (1011, pytest.approx(3.0))
        await probe.wait_left()


async def test_no_pings_where_none_are_wanted(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(WebsocketProbe().app, websocket_ping_interval=0.0) as server:
        client = await open_websocket(server, "/echo")
        await trio.sleep(20)
        await client.text("hello")
        assert await client.message() == "hello"
