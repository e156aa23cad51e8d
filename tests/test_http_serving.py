"""Requests, responses, limits, and the logs of the serving loop."""

from __future__ import annotations

import logging
import re
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from helpers_http import Client, Probe, get, post, serving, start_stream
from trioserve.server import byte_streams, h11_protocol
from trioserve.server.connection import Connection
from trioserve.server.h11_protocol import is_chunked
from trioserve.server.http import HttpLimits, _make_context, serve_http
from trioserve.server.sse import sse_response

if TYPE_CHECKING:
    from pathlib import Path

    import quart


async def test_a_connection_is_used_again(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        for n in range(1100):  # more than hypercorn's usual limit per connection
            await client.send(get(f"/hello?n={n}"))
            assert (await client.read_reply()).body == b"hello %d" % n


async def test_pipelined_requests_are_answered_in_order(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        requests = [get("/hello?n=0"), post("/echo", bytes(20_000)), get("/stream/gate"), get("/hello?n=3")]
        await client.send(b"".join(requests))
        assert (await client.read_reply()).body == b"hello 0"
        assert (await client.read_reply()).body == b'{"size":20000}\n'
        frames = probe.gate.let(3)
        probe.gate.end()
        assert (await client.read_reply()).body == frames
        assert (await client.read_reply()).body == b"hello 3"


async def test_a_request_may_arrive_byte_by_byte(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        for byte in post("/echo", b"abc") + get("/hello"):
            await client.send(bytes([byte]))
        assert (await client.read_reply()).body == b'{"size":3}\n'
        assert (await client.read_reply()).body == b"hello"


@pytest.mark.parametrize("empty", [b"\r\n", b"\n", b"\r\n\r\n", b"\r"])
async def test_empty_lines_before_a_request_are_passed_over(probe: Probe, empty: bytes) -> None:
    """RFC 9112, section 2.2: some clients send one after a body."""
    async with serving(probe.app) as server:
        client = await server.connect()
        for between in (empty, b""):  # together with what is around, or by itself
            await client.send(empty + post("/echo", b"abc") + between)
            assert (await client.read_reply()).body == b'{"size":3}\n'
            await client.send(empty)
            await trio.testing.wait_all_tasks_blocked()
        await client.send(get("/hello") + empty + get("/hello"))
        for _ in range(2):
            assert (await client.read_reply()).body == b"hello"


async def test_empty_lines_do_not_keep_a_connection(
    probe: Probe, autojump_clock: trio.testing.MockClock
) -> None:
    autojump_clock.autojump_threshold = 0.003
    async with serving(probe.app, keep_alive_timeout=2.0) as server:
        client = await server.connect()
        started = trio.current_time()
        with suppress(trio.BrokenResourceError):
            while trio.current_time() < started + 100:
                await client.send(b"\r\n")
                await trio.sleep(0.5)
        assert trio.current_time() - started < 4


async def test_head_has_no_body(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(get("/hello").replace(b"GET", b"HEAD"))
        status, headers = await client.read_head()
        assert (status, headers["content-length"]) == (200, "5")
        await client.send(get("/hello"))
        assert (await client.read_reply()).body == b"hello"


@pytest.mark.parametrize(
    ("method", "status", "body"), [("HEAD", 200, b"x"), ("GET", 204, b"x"), ("GET", 200, b"")]
)
async def test_an_application_that_sends_nothing_without_end_holds_up_nobody(
    method: str, status: int, body: bytes
) -> None:
    """Where no part of its body goes out, and it waits for nothing else."""
    began, left, sent = trio.Event(), trio.Event(), 0

    async def app(scope, receive, send) -> None:
        nonlocal sent
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": status, "headers": []})
        try:
            while sent < 10**6:  # not for ever, so that this test can fail
                await send({"type": "http.response.body", "body": body, "more_body": True})
                sent += 1
                began.set()
        finally:
            left.set()

    async with serving(app) as server:
        client = await server.connect()
        await client.send(get("/").replace(b"GET", method.encode()))
        await began.wait()
        assert not left.is_set()
        client.close()
        with trio.fail_after(5):
            await left.wait()
        assert sent < 10**6


async def test_http_1_0_is_answered_and_closed(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(b"GET /hello HTTP/1.0\r\n\r\n")
        answer = await client.read_to_end()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nhello")


async def test_headers_of_the_server(probe: Probe) -> None:
    async with serving(probe.app) as server:
        reply = await server.ask(get("/hello"))
    assert "date" in reply.headers
    assert "server" not in reply.headers


async def test_100_continue(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(
            b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n"
        )
        assert (await client.read_head())[0] == 100
        await client.send(b"abc")
        assert (await client.read_reply()).body == b'{"size":3}\n'


async def test_a_unix_socket(probe: Probe, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "http.sock"))
    listener.listen()
    async with serving(probe.app, listener=listener) as server:
        assert (await server.ask(get("/hello"))).body == b"hello"
        client = await start_stream(server, "/wait")
        await probe.entered.wait()
        client.close()
        await probe.wait_left()


async def test_several_listeners(probe: Probe) -> None:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [sock.getsockname() for sock in sockets]
    shutdown = trio.Event()
    serve = partial(serve_http, probe.app, sockets, HttpLimits(), shutdown=shutdown, access_log=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        for address in addresses:
            client = Client(await trio.open_tcp_stream(*address))
            await client.send(get("/hello"))
            assert (await client.read_reply()).body == b"hello"
            client.close()
        shutdown.set()
    assert all(sock.fileno() == -1 for sock in sockets)


# Bodies and headers that are too large


def chunked(size: int) -> bytes:
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunk * (size // 0x10000) + b"0\r\n\r\n"


@pytest.mark.parametrize("request_bytes", [post("/echo", bytes(3_000_000)), chunked(3_000_000)])
async def test_a_body_too_large_is_refused_though_its_sender_goes_on(
    probe: Probe, request_bytes: bytes
) -> None:
    async with serving(probe.app, max_body_size=1_000_000) as server:
        client = await server.connect()
        await client.send(request_bytes)
        reply = await client.read_reply()
        assert reply.status == 413
        assert reply.error["message"] == "The body is larger than 1000000 bytes."
        assert await client.read_to_end() == b""
        assert (await server.ask(post("/echo", bytes(1_000_000)))).body == b'{"size":1000000}\n'


async def test_the_applications_own_413_reaches_a_client_that_goes_on(probe: Probe) -> None:
    probe.app.config["MAX_CONTENT_LENGTH"] = 1000
    async with serving(probe.app) as server:
        for request_bytes in (post("/echo", bytes(3_000_000)), chunked(3_000_000)):
            client = await server.connect()
            await client.send(request_bytes)
            assert (await client.read_reply()).status == 413


async def test_no_100_continue_for_a_body_too_large(probe: Probe) -> None:
    async with serving(probe.app, max_body_size=10) as server:
        reply = await server.ask(
            b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\nexpect: 100-continue\r\n\r\n"
        )
    assert reply.status == 413


async def test_headers_too_large(probe: Probe) -> None:
    async with serving(probe.app, max_header_bytes=2000) as server:
        assert (await server.ask(get("/hello", "x-long: " + "x" * 1500))).status == 200
        reply = await server.ask(b"GET /hello HTTP/1.1\r\nx-long: " + b"x" * 200_000)
        assert reply.status == 431
        assert reply.error["code"] == "headers_too_large"
        assert "2000 bytes" in reply.error["message"]


# Idle connections


@pytest.mark.parametrize("sent", [b"", b"GET /hello HTTP/1.1\r\nhost:"], ids=["nothing", "half a head"])
@pytest.mark.parametrize("requests_before", [0, 1])
async def test_idle_connections_are_closed(probe: Probe, sent: bytes, requests_before: int) -> None:
    async with serving(probe.app, keep_alive_timeout=0.2) as server:
        client = await server.connect()
        for _ in range(requests_before):
            await client.send(get("/hello"))
            await client.read_reply()
        await client.send(sent)
        assert await client.read_to_end() == b""


async def test_a_stream_is_not_idle(probe: Probe) -> None:
    async with serving(probe.app, keep_alive_timeout=0.2) as server:
        client = await start_stream(server, "/stream/gate")
        await probe.entered.wait()
        idle = await server.connect()
        assert await idle.read_to_end() == b""  # so the time is over
        frames = probe.gate.let(1)
        probe.gate.end()
        assert (await client.read_reply()).body == frames


# Writing


async def test_a_client_that_does_not_read_is_given_up(probe: Probe) -> None:
    async with serving(probe.app, write_timeout=0.2) as server:
        await start_stream(server, "/stream/flood", receive_buffer=4096)
        await probe.wait_left()
        assert (await server.ask(get("/hello"))).body == b"hello"


class SlowSocket:
    """Takes a hundred bytes every `delay` seconds."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.taken = b""
        self.closed = False

    async def send(self, data: memoryview) -> int:
        await trio.sleep(self.delay)
        self.taken += bytes(data[:100])
        return len(data[:100])

    def close(self) -> None:
        self.closed = True


async def write_slowly(delay: float, monkeypatch: pytest.MonkeyPatch) -> SlowSocket:
    sock = SlowSocket(delay)
    monkeypatch.setattr(byte_streams, "write_now", lambda _sock, _data: 0)
    stream = type("Stream", (), {"socket": sock})()
    context = _make_context(Probe().app, HttpLimits(write_timeout=30.0), access_log=False)
    await Connection(context, stream).write(bytes(range(250)) * 4)
    return sock


async def test_progress_resets_the_write_timeout(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock = await write_slowly(29.0, monkeypatch)
    assert sock.taken == bytes(range(250)) * 4
    assert not sock.closed


async def test_no_progress_ends_the_write(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock = await write_slowly(31.0, monkeypatch)
    assert sock.taken == b""
    assert sock.closed


class Blocks:
    """Frames of many sizes, together more than the kernel holds."""

    def __init__(self) -> None:
        self.sizes = [1, 15, 16, 4096, 65536, 300_000, 7, 2_000_000] * 4

    async def next_frame(self) -> bytes | None:
        await trio.lowlevel.checkpoint()
        if not self.sizes:
            return None
        size = self.sizes.pop()
        return bytes([size % 251]) * size


async def read_blocks(probe: Probe) -> bytes:
    @probe.app.get("/blocks")
    async def blocks() -> quart.Response:
        await trio.lowlevel.checkpoint()
        response = sse_response(Blocks())
        response.headers["date"] = "today"
        return response

    async with serving(probe.app) as server:
        client = await server.connect(receive_buffer=65536)
        await client.send(get("/blocks", "connection: close"))
        answer = await client.read_to_end()
    return re.sub(rb"date: [^t].*\r\n", b"", answer)


async def test_the_fast_ways_give_the_bytes_of_the_slow_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = await read_blocks(Probe())
    monkeypatch.setattr(byte_streams, "write_now", lambda _sock, _data: 0)
    monkeypatch.setattr(h11_protocol, "is_chunked", lambda _head: False)
    slow = await read_blocks(Probe())
    assert len(fast) > 9_000_000
    assert fast == slow


def test_the_fast_way_of_chunks_is_taken(probe: Probe) -> None:
    import h11

    protocol = h11.Connection(h11.SERVER)
    protocol.receive_data(get("/"))
    protocol.next_event()
    assert is_chunked(protocol.send(h11.Response(status_code=200, headers=[(b"content-type", b"text/html")])))
    protocol = h11.Connection(h11.SERVER)
    assert not is_chunked(protocol.send(h11.Response(status_code=200, headers=[(b"content-length", b"1")])))


async def test_the_fast_way_of_writes_is_taken() -> None:
    ours, theirs = trio.socket.socketpair()
    with ours, theirs:
        assert byte_streams.write_now(ours, b"hello") == 5
        assert await theirs.recv(10) == b"hello"
        while byte_streams.write_now(ours, bytes(65536)):
            pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        byte_streams.write_now(ours, b"closed")


# Logs


async def test_access_log(probe: Probe, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trioserve.access")
    async with serving(probe.app, access_log=True) as server:
        await server.ask(get("/hello?n=secret"))
        await server.ask(get("/nowhere"))
        await server.ask(b"garbage\r\n\r\n")
        await server.ask(b"POST /echo?secret HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        client = await start_stream(server, "/wait")
        await probe.entered.wait()
        client.close()
        await probe.wait_left()
        await trio.testing.wait_all_tasks_blocked()
    lines = sorted(record.getMessage() for record in caplog.records if record.name == "trioserve.access")
    expected = ["- - 400", "GET /hello 200", "GET /nowhere 404", "GET /wait 499", "POST /echo 413"]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert re.fullmatch(rf"{start} \d+\.\d ms 127\.0\.0\.1:\d+", line)


async def test_access_log_is_off_when_not_wanted(probe: Probe, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trioserve.access")
    async with serving(probe.app) as server:
        await server.ask(get("/hello"))
    assert not [record for record in caplog.records if record.name == "trioserve.access"]


def test_what_is_relied_on_exists() -> None:
    """Names of other packages that are private, or whose place in a class is not promised."""
    from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
    from hypercorn.trio.task_group import TaskGroup
    from quart.asgi import ASGIHTTPConnection
    from werkzeug.routing import Rule

    assert callable(HTTPStream._send_error_response)
    assert callable(HTTPStream.app_send)
    assert {"REQUEST", "RESPONSE", "CLOSED"} <= set(ASGIHTTPState.__members__)
    assert callable(TaskGroup.spawn)
    assert callable(ASGIHTTPConnection._create_request_from_scope)
    assert callable(Rule._compile_builder)
