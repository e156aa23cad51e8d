"""A refusal says the id of its request, also if the application never saw it."""

from __future__ import annotations

import pytest
import trio

from helpers_http import Probe, get, serving

TOO_LARGE = "content-length: 99999999"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/hello", "X-Request-Id: a b-7", TOO_LARGE), 413),
        (get("http:nonsense", "X-Request-Id: a b-7"), 400),
        (get("/hello", "X-Request-Id: a b-7").replace(b"/1.1", b"/2.0"), 505),
        (get("/hello", "X-Request-Id:a b-7 ", "a: " + "b" * 70_000), 431),
    ],
)
async def test_a_refusal_says_the_request_id(probe: Probe, request_bytes: bytes, status: int) -> None:
    async with serving(probe.app) as server:
        reply = await server.ask(request_bytes)
    assert reply.status == status
    assert reply.headers["x-request-id"] == "a b-7"


async def test_an_application_that_fails_says_the_request_id() -> None:
    async def app(scope, receive, send) -> None:
        await trio.lowlevel.checkpoint()

    async with serving(app) as server:
        for given, said in (("a b-7", "a b-7"), ("a\tb", None)):
            reply = await server.ask(get("/", f"X-Request-Id: {given}"))
            assert (reply.status, reply.headers.get("x-request-id")) == (500, said)


async def test_an_id_cut_off_by_the_limit_is_not_said(probe: Probe) -> None:
    async with serving(probe.app, max_header_bytes=1000) as server:
        reply = await server.ask(b"GET / HTTP/1.1\r\na: " + b"b" * 990 + b"\r\nx-request-id: half-of-i")
    assert reply.status == 431
    assert "x-request-id" not in reply.headers


async def test_looking_for_the_id_takes_no_time(probe: Probe) -> None:
    """Blanks make careless patterns slow: here, minutes."""
    async with serving(probe.app) as server:
        reply = await server.ask(b"GET / HTTP/1.1\r\nx-request-id:" + b" \t" * 60_000)
    assert reply.status == 431


@pytest.mark.parametrize("given", [b"a" * 257, b"\xe4", b"a\tb", b"a\x01b", b""])
@pytest.mark.parametrize("more", [TOO_LARGE.encode(), b"a: " + b"b" * 70_000])
async def test_a_request_id_that_may_not_be_said_is_not(probe: Probe, given: bytes, more: bytes) -> None:
    async with serving(probe.app) as server:
        request = b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: " + given + b"\r\n" + more + b"\r\n\r\n"
        reply = await server.ask(request)
    assert reply.status in {413, 431}
    assert "x-request-id" not in reply.headers


@pytest.mark.parametrize("second", [get("/hello", TOO_LARGE), b"garbage\r\n\r\n"])
async def test_the_id_of_one_request_is_not_the_next_ones(probe: Probe, second: bytes) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(get("/hello", "X-Request-Id: first") + second)
        assert (await client.read_reply()).status == 200
        reply = await client.read_reply()
    assert reply.status in {400, 413}
    assert "x-request-id" not in reply.headers
