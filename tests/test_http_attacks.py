"""Clients that mean harm, or are only very slow: each costs its own connection."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from fake_engine import FakeEngine, open_fake_llm
from helpers_http import Client, Probe, Server, get, post, serving
from helpers_http_fuzz import CountingApplication, whole_request
from test_http_isolation import CRASH_INPUTS, open_neighbour, send_and_read_to_end
from trioserve.server.app import create_app
from trioserve.server.errors import install_error_handler
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHUNKED = b"POST /echo HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def probe() -> Probe:
    probe = Probe()
    install_error_handler(probe.app)
    return probe


async def seconds_until_closed(client: Client) -> float:
    """On the mock clock."""
    started = trio.current_time()
    assert await client.read_to_end() == b""
    return trio.current_time() - started


async def send_until_cut_off(client: Client, data: bytes) -> None:
    """Again and again."""
    for _ in range(1000):
        try:
            await client.send(data)
        except trio.BrokenResourceError:
            return
        await trio.testing.wait_all_tasks_blocked()
    raise AssertionError


async def trickle(client: Client, data: bytes, interval: float) -> None:
    """A byte every `interval` seconds, as long as the server takes them."""
    for byte in data:
        try:
            await client.send(bytes([byte]))
        except trio.BrokenResourceError:
            return
        await trio.sleep(interval)


# Slow clients


@pytest.mark.parametrize("requests_before", [0, 1])
async def test_slow_headers_have_the_keep_alive_timeout_in_total(
    probe: Probe, requests_before: int, autojump_clock: trio.testing.MockClock
) -> None:
    autojump_clock.autojump_threshold = 0.003
    async with serving(probe.app, keep_alive_timeout=4.0) as server:
        client = await server.connect()
        for _ in range(requests_before):
            await client.send(get("/hello"))
            await client.read_reply()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle, client, get("/hello"), 0.7)
            assert await seconds_until_closed(client) == pytest.approx(4.0, abs=0.1)


@pytest.mark.parametrize("head", [CHUNKED + b"64\r\n", post("/echo", bytes(100))[:-100]])
async def test_a_slow_body_gets_408(
    probe: Probe, head: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    autojump_clock.autojump_threshold = 0.003
    probe.app.config["BODY_TIMEOUT"] = 3.0
    async with serving(probe.app, keep_alive_timeout=1.0) as server:
        client = await server.connect()
        started = trio.current_time()
        await client.send(head)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle, client, bytes(50), 0.5)
            reply = await client.read_reply()
            assert trio.current_time() - started == pytest.approx(3.0, abs=0.1)
            assert reply.status == 408
            assert reply.error["code"] == "request_timeout"
            assert reply.headers["connection"] == "close"
            assert await seconds_until_closed(client) < 1.1
        assert probe.left.is_set()


async def test_a_client_that_stops_in_its_body_is_not_kept_after_an_answer(
    probe: Probe, autojump_clock: trio.testing.MockClock
) -> None:
    autojump_clock.autojump_threshold = 0.003
    async with serving(probe.app, keep_alive_timeout=2.0) as server:
        client = await server.connect()
        await client.send(post("/refuse", bytes(100))[:-1])
        assert (await client.read_reply()).status == 401
        assert await seconds_until_closed(client) == pytest.approx(0.0, abs=0.1)
        # The server has shut its side, and waits for the rest no longer than it would for a request.
        await trio.sleep(2.1)
        await send_until_cut_off(client, b"x")


async def test_slow_readers_do_not_hold_up_a_neighbour(probe: Probe) -> None:
    async with serving(probe.app, write_timeout=0.3) as server:
        expected = probe.gate.let(1)
        neighbour = await open_neighbour(server, probe)
        for _ in range(20):
            slow = await server.connect(receive_buffer=4096)
            await slow.send(get("/stream/flood"))
        for _ in range(20):
            expected += probe.gate.let(1)
            await trio.sleep(0.01)
        probe.gate.end()
        assert (await read_chunks(neighbour)) == expected
        await probe.wait_left()


async def read_chunks(client: Client) -> bytes:
    body = b""
    while chunk := await client.read_chunk():
        body += chunk
    return body


# Too much of everything


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
async def test_many_header_lines(probe: Probe, end: bytes) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        # Lines are counted for each request: several in one piece may have more together.
        for _ in range(2):
            await client.send(end.join([b"GET /hello HTTP/1.1", b"host: x", *[b"a: b"] * 99, b"", b""]) * 3)
            for _ in range(3):
                assert (await client.read_reply()).status == 200
        for ending in (b"", end):  # as soon as there are too many, or when all have come
            lines = [b"GET /hello HTTP/1.1", b"host: x", b"X-Request-Id: 1-2 3 ", *[b"a: b"] * 99, b""]
            reply = await server.ask(end.join(lines) + ending)
            assert reply.status == 431
            assert reply.error["message"] == "The request has more than 100 header lines."
            assert reply.error["code"] == "headers_too_large"
            assert reply.headers["x-request-id"] == "1-2 3"


async def test_header_lines_arriving_one_by_one(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(b"GET /hello HTTP/1.1\r\nhost: x\r\n")
        for _ in range(100):
            await client.send(b"a: b\r\n")
            await trio.testing.wait_all_tasks_blocked()
        assert (await client.read_reply()).status == 431


@pytest.mark.parametrize(
    "head", [b"GET /" + b"a" * 200_000, b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 200_000]
)
async def test_a_huge_line(probe: Probe, head: bytes) -> None:
    async with serving(probe.app, keep_alive_timeout=1) as server:
        answer = await send_and_read_to_end(await server.connect(), head)
        assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_huge_chunk_extension(probe: Probe) -> None:
    async with serving(probe.app, keep_alive_timeout=1) as server:
        answer = await send_and_read_to_end(await server.connect(), CHUNKED + b"5;" + b"e" * 200_000)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"A line between the chunks of the body is longer than 65536 bytes." in answer
        assert probe.left.is_set()


async def test_a_body_of_many_small_chunks_lets_others_run(probe: Probe) -> None:
    async with serving(probe.app) as server:
        expected = probe.gate.let(1)
        neighbour = await open_neighbour(server, probe)
        client = await server.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, CHUNKED + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n")
            for _ in range(10):
                frame = probe.gate.let(1)
                expected += frame
            probe.gate.end()
            assert (await read_chunks(neighbour)) == expected
            assert (await client.read_reply()).body == b'{"size":10000}\n'


@pytest.mark.parametrize(
    ("framing", "status"),
    [
        ("content-length: 5\r\ntransfer-encoding: chunked", 400),
        ("transfer-encoding: chunked\r\ncontent-length: 5", 400),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked", 501),
        ("transfer-encoding: xchunked", 501),
        ("transfer-encoding: chunked, identity", 501),
        ("transfer-encoding : chunked", 400),
        ("content-length: 5\r\ncontent-length: 6", 400),
        ("content-length: +5", 400),
        ("content-length: 5 5", 400),
        ("content-length: 0x5", 400),
        ("content-length : 5", 400),
    ],
)
async def test_a_body_whose_end_is_in_doubt_is_refused(probe: Probe, framing: str, status: int) -> None:
    """And what follows it is not taken for a request (RFC 9112, sections 6 and 11.2)."""
    smuggled = get("/wait")
    async with serving(probe.app, keep_alive_timeout=1) as server:
        data = f"POST /echo HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n0\r\n\r\n".encode() + smuggled
        answer = await send_and_read_to_end(await server.connect(), data)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert not probe.entered.is_set()


async def test_chunks_are_not_for_http_1_0(probe: Probe) -> None:
    async with serving(probe.app, keep_alive_timeout=1) as server:
        answer = await send_and_read_to_end(
            await server.connect(), CHUNKED.replace(b"/1.1", b"/1.0") + b"0\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 400 ")


async def test_what_follows_the_last_request_is_ignored(probe: Probe) -> None:
    """RFC 9112, section 9.6; some clients send an empty line after a body."""
    for request in (get("/hello", "connection: close"), get("/hello").replace(b"/1.1", b"/1.0")):
        for more in (b"\r\n", b"garbage\r\n\r\n", get("/wait")):
            async with serving(probe.app, keep_alive_timeout=1) as server:
                answer = await send_and_read_to_end(await server.connect(), request + more)
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert answer.endswith(b"\r\n\r\nhello")
                assert not probe.entered.is_set()


async def test_a_hundred_thousand_pipelined_requests(probe: Probe) -> None:
    """More of them than may wait: the client is dropped, what it was told until then is right."""
    async with serving(probe.app, keep_alive_timeout=1) as server:
        expected = probe.gate.let(1)
        neighbour = await open_neighbour(server, probe)
        client = await server.connect()
        answers = await send_and_read_to_end(client, get("/hello") * 100_000)
        assert answers.count(b"\r\n\r\nhello") == answers.count(b"HTTP/1.1 ") < 100_000
        expected += probe.gate.let(1)
        probe.gate.end()
        assert (await read_chunks(neighbour)) == expected


async def test_what_waits_behind_running_requests_is_bounded(probe: Probe) -> None:
    """However many of the requests before it have been answered meanwhile."""
    turns = trio.Semaphore(0)

    @probe.app.get("/turn")
    async def turn() -> str:
        await turns.acquire()
        return "done"

    async with serving(probe.app, max_pipelined_bytes=1000) as server:
        client = await server.connect()
        await client.send(get("/turn") * 20)
        turns.release()
        assert (await client.read_reply()).body == b"done"
        await client.send(get("/turn") * 20)
        assert await client.read_to_end() == b""


# Connections that end at any moment


async def test_a_reset_after_every_byte() -> None:
    application = CountingApplication()
    data = whole_request(1) + get("/gate")
    async with serving(application.app) as server:
        frames = application.gate.let(1)
        neighbour = await server.connect()
        await neighbour.send(get("/gate"))
        await neighbour.read_head()
        for length in range(len(data) + 1):
            client = await server.connect()
            await client.send(data[:length])
            if length % 2:
                await trio.lowlevel.checkpoint()
            client.reset()
        frames += application.gate.let(2)
        application.gate.end()
        assert await read_chunks(neighbour) == frames
        await application.wait_until_open(0)


async def test_a_client_that_says_nothing_and_never_closes(
    probe: Probe, autojump_clock: trio.testing.MockClock
) -> None:
    """As one whose network is gone: what the server waits for has an end in every state."""
    autojump_clock.autojump_threshold = 0.003
    probe.app.config["BODY_TIMEOUT"] = 2.0
    async with serving(probe.app, keep_alive_timeout=2.0, write_timeout=2.0) as server:
        states = [b"", b"GET /he", post("/echo", b"1234")[:-1], get("/stream/flood"), get("/hello")]
        clients = [await server.connect(receive_buffer=4096) for _ in states]
        for client, data in zip(clients, states, strict=True):
            await client.send(data)
        await trio.sleep(5)
        for client in clients:
            with suppress(trio.BrokenResourceError):
                await client.read_to_end()


# The real application


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeEngine, Server]]:
    args = ServerArgs(api_key=("sesame",), max_body_size=1_000_000)
    async with (
        open_fake_llm(tmp_path, monkeypatch) as fake,
        serving(
            create_app(fake.llm, args), keep_alive_timeout=0.3, max_body_size=args.max_body_size
        ) as server,
    ):
        yield fake, server


@pytest.mark.parametrize("name", [name for name in CRASH_INPUTS if not name.startswith("h2c")])
async def test_the_real_application_refuses_with_error_objects(
    api: tuple[FakeEngine, Server], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake, server = api
    answer = await send_and_read_to_end(await server.connect(), CRASH_INPUTS[name])
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501 "))
    assert set(json.loads(body[: content_length(head)])["error"]) == {"message", "type", "param", "code"}
    assert not fake.client.added
    assert (await server.ask(get("/health"))).status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def content_length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length: ")[2].split()[0])


@pytest.mark.parametrize(
    ("key", "size", "status"),
    [("wrong", 900_000, 401), ("wrong", 3_000_000, 413), ("sesame", 3_000_000, 413)],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_early_refusal_can_be_read_by_one_who_sends_on(
    api: tuple[FakeEngine, Server], key: str, size: int, status: int, chunked: bool
) -> None:
    """The whole body is sent before the answer is read."""
    _, server = api
    headers = (f"authorization: Bearer {key}", "content-type: application/json", "x-request-id: r-1")
    data = post("/v1/completions", bytes(size), *headers)
    if chunked:
        head = data.partition(b"\r\n\r\n")[0].replace(
            b"content-length: %d" % size, b"transfer-encoding: chunked"
        )
        data = head + b"\r\n\r\n" + (b"8000\r\n" + bytes(0x8000) + b"\r\n") * (size // 0x8000) + b"0\r\n\r\n"
    client = await server.connect()
    await client.send(data)
    reply = await client.read_reply()
    assert reply.status == (401 if chunked and key == "wrong" else status)
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["x-request-id"] == "r-1"
