"""What a client or an application does wrong ends its own connection, and nothing else."""

from __future__ import annotations

import logging
import os

import hpack
import pytest
import trio

from helpers_http import Client, Probe, Server, get, post, serving
from trioserve.server.h11_protocol import Http1Protocol
from trioserve.server.http_context import FailureLog

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WEBSOCKET = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def headers_frame(*headers: tuple[bytes, bytes], end: bool = True) -> bytes:
    end_headers, end_stream = 4, 1
    return frame(1, end_headers | (end_stream if end else 0), 1, hpack.Encoder().encode(headers))


def http2(*frames: bytes) -> bytes:
    settings = frame(4, 0, 0, b"")
    return PREFACE + settings + b"".join(frames)


METHOD, SCHEME, PATH, HOST = (
    (b":method", b"GET"),
    (b":scheme", b"http"),
    (b":path", b"/hello"),
    (b":authority", b"x"),
)
PRIORITY = (0).to_bytes(4, "big") + b"\x10"

CRASH_INPUTS = {
    "h2c goaway while streaming": http2(
        headers_frame(METHOD, SCHEME, (b":path", b"/stream/trickle"), HOST), frame(7, 0, 0, bytes(8))
    ),
    "h2c method not ascii": http2(headers_frame((b":method", b"G\xc3\x89T"), SCHEME, PATH, HOST)),
    "h2c path not ascii": http2(headers_frame(METHOD, SCHEME, (b":path", b"/\xff\xfe"), HOST)),
    "h2c connect": http2(headers_frame((b":method", b"CONNECT"), HOST)),
    "h2c data after the answer": http2(
        headers_frame((b":method", b"POST"), SCHEME, (b":path", b"/refuse"), HOST, end=False),
        *[frame(0, 0, 1, bytes(1000))] * 50,
    ),
    "h2c 1500 priority frames": http2(*[frame(2, 0, 2 * n + 1, PRIORITY) for n in range(1500)]),
    "h2c priority on a missing parent": http2(frame(2, 0, 3, (99).to_bytes(4, "big") + b"\x10")),
    "upgrade to h2c, bad settings": get(
        "/hello", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: %%%"
    ),
    "garbage": bytes(range(256)) * 40,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "bad chunk": b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
    "two lengths": b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length is not a number": b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    "unknown transfer encoding": b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: magic\r\n\r\n",
    "no host": b"GET /hello HTTP/1.1\r\n\r\n",
    "connect": b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n",
    "query without a path": b"GET ?x=1 HTTP/1.1\r\nhost: x\r\n\r\n",
    "early refusal of a large body": post("/refuse", bytes(3_000_000)),
    "websocket garbage": get("/hello", *WEBSOCKET, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
    + os.urandom(999),
    "websocket without a key": get("/hello", *WEBSOCKET),
    "websocket on an unknown path": get("/nowhere", *WEBSOCKET, "Sec-WebSocket-Key: x"),
}


async def open_neighbour(server: Server, probe: Probe) -> Client:
    client = await server.connect()
    await client.send(get("/stream/gate"))
    await client.read_head()
    return client


async def send_and_read_to_end(client: Client, data: bytes) -> bytes:
    """Both at the same time, as a client with a large body does."""
    answers = []

    async def read() -> None:
        answers.append(await client.read_to_end())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send, data)
        nursery.start_soon(read)
    return answers[0]


@pytest.mark.parametrize("name", CRASH_INPUTS)
async def test_a_neighbour_loses_nothing(probe: Probe, name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(probe.app, keep_alive_timeout=0.3) as server:
        expected = probe.gate.let(2)
        neighbour = await open_neighbour(server, probe)
        answer = await send_and_read_to_end(await server.connect(), CRASH_INPUTS[name])
        assert answer.startswith(b"HTTP/1.1 ")
        expected += probe.gate.let(3)
        probe.gate.end()
        body = b""
        while chunk := await neighbour.read_chunk():
            body += chunk
        assert body == expected
        assert (await server.ask(get("/hello"))).body == b"hello"
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("h2c connect", 505),
        ("garbage", 400),
        ("TLS", 400),
        ("bad chunk", 400),
        ("two lengths", 400),
        ("length is not a number", 400),
        ("unknown transfer encoding", 501),
        ("no host", 400),
        ("connect", 400),
        ("query without a path", 400),
    ],
)
async def test_broken_requests_get_an_error_object(probe: Probe, name: str, status: int) -> None:
    async with serving(probe.app) as server:
        reply = await server.ask(CRASH_INPUTS[name])
    assert reply.status == status
    assert reply.headers["connection"] == "close"
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert reply.error["param"] is None


@pytest.mark.parametrize("method", [b"get", b"HEaD"])
async def test_methods_are_spelled_in_capitals(probe: Probe, method: bytes) -> None:
    async with serving(probe.app) as server:
        reply = await server.ask(get("/hello").replace(b"GET", method))
    assert reply.status == 501
    assert reply.error["message"] == "Methods are spelled in capital letters."


async def test_http2_is_ignored_as_an_upgrade(probe: Probe) -> None:
    async with serving(probe.app) as server:
        reply = await server.ask(CRASH_INPUTS["upgrade to h2c, bad settings"])
    assert (reply.status, reply.body) == (200, b"hello")


async def test_an_absolute_target_is_served(probe: Probe) -> None:
    probe.app.get("/")(probe.hello)
    async with serving(probe.app) as server:
        for target in (
            b"http://example.org/hello?n=7",
            b"HTTP://example.org:80?n=7",
            b"https://example.org/?n=7",
        ):
            reply = await server.ask(b"GET " + target + b" HTTP/1.1\r\nhost: example.org\r\n\r\n")
            assert reply.body == b"hello 7"


@pytest.mark.parametrize("request_first", [False, True])
async def test_many_resets(probe: Probe, request_first: bool) -> None:
    async with serving(probe.app) as server:
        for _ in range(200):
            client = await server.connect()
            if request_first:
                await client.send(get("/hello"))
            client.reset()
        assert (await server.ask(get("/hello"))).body == b"hello"


async def run_faulty(app, caplog: pytest.LogCaptureFixture) -> bytes:
    """What a client reads of a faulty application; the fault must be in the log, once."""
    async with serving(app) as server:
        answer = await send_and_read_to_end(await server.connect(), get("/fault"))
        assert (await server.ask(get("/"))).body == b"ok"
    assert len([record for record in caplog.records if record.name == "trioserve.http"]) == 1
    assert "GET /fault" in caplog.text
    return answer


def faulty(fault):
    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/fault":
            await fault(send)
        else:
            await start(send, b"2")
            await send({"type": "http.response.body", "body": b"ok"})

    return app


async def start(send, length: bytes | None = None) -> None:
    headers = [] if length is None else [(b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def test_an_application_that_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fault(send) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("boom")

    answer = await run_faulty(faulty(fault), caplog)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b'"type":"server_error"' in answer
    assert "boom" in caplog.text


async def test_an_application_that_fails_in_its_body(caplog: pytest.LogCaptureFixture) -> None:
    async def fault(send) -> None:
        await start(send)
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise RuntimeError("boom")

    answer = await run_faulty(faulty(fault), caplog)
    assert answer.endswith(b"4\r\npart\r\n")  # the end is missing, so the client knows


@pytest.mark.parametrize("length", [b"1", b"99"])
async def test_an_application_with_a_wrong_length(length: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def fault(send) -> None:
        await start(send, length)
        await send({"type": "http.response.body", "body": b"four"})

    await run_faulty(faulty(fault), caplog)


async def test_a_fault_in_the_connection_itself(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive = Http1Protocol.receive

    async def fragile(self: Http1Protocol, data: bytes) -> None:
        if data == b"break":
            raise RuntimeError("a bug")
        await receive(self, data)

    monkeypatch.setattr(Http1Protocol, "receive", fragile)
    async with serving(probe.app) as server:
        expected = probe.gate.let(1)
        neighbour = await open_neighbour(server, probe)
        client = await server.connect()
        host, port = client.stream.socket.getsockname()
        assert await send_and_read_to_end(client, b"break") == b""
        assert await neighbour.read_chunk() == expected
    assert f"the connection of {host}:{port} failed" in caplog.text
    assert "a bug" in caplog.text


def test_failures_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    failures = FailureLog(burst=3)
    with caplog.at_level(logging.ERROR, "trioserve.http"):
        for n in range(10):
            failures.report("failure %d", n, error=RuntimeError("x"))
        assert [record.getMessage() for record in caplog.records] == ["failure 0", "failure 1", "failure 2"]
        now += 1.0
        failures.report("failure %d", 10, error=RuntimeError("x"))
        failures.report("failure %d", 11, error=RuntimeError("x"))
    assert caplog.messages[3:] == ["failure 10 (7 such failures before this one were not logged)"]
