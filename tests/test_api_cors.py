"""Which pages' scripts may read answers: what a browser needs for it, on every kind of answer."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Answer, Client, FakeLLM, Reply
from trioserve.errors import InvalidConfigError, OverloadedError
from trioserve.server_args import ServerArgs

PAGE = "https://page.example"
TEXT = {"prompt": "Hi"}
PATH = "/v1/completions"


async def preflight(args: ServerArgs, path: str = PATH, **headers: str) -> Reply:
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    dashed = {name.replace("_", "-"): value for name, value in headers.items()}
    return await Client(FakeLLM(), args).call("OPTIONS", path, b"", asked | dashed)


def cors_headers(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control")}


def varies(reply: Reply) -> set[str]:
    return {name.strip() for name in reply.headers.get("vary", "").lower().split(",") if name.strip()}


async def test_by_default_no_page_is_let_in() -> None:
    reply = await preflight(ServerArgs())
    assert not cors_headers(reply)
    assert "vary" not in reply.headers
    reply = await Client(FakeLLM()).post(PATH, TEXT, origin=PAGE)
    assert reply.status == 200
    assert not cors_headers(reply)
    assert (await preflight(ServerArgs(api_key="k"))).status == 401


@pytest.mark.parametrize("path", [PATH, "/v1/nothing"])
async def test_a_preflight_needs_no_key(path: str) -> None:
    reply = await preflight(ServerArgs(api_key="k", allowed_origins=PAGE), path)  # type: ignore[arg-type]
    assert (reply.status, reply.body) == (200, b"")
    assert cors_headers(reply) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "access-control-allow-headers": (
            "Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Request-Timeout"
        ),
        "access-control-expose-headers": "X-Request-Id, Retry-After",
        "access-control-max-age": "600",
    }
    assert "origin" in varies(reply)


@pytest.mark.parametrize(
    "origin",
    ["https://other.example", "http://page.example", f"{PAGE}:8443", f"{PAGE}.evil.example", "null", ""],
)
async def test_origins_must_match_exactly(origin: str) -> None:
    args = ServerArgs(allowed_origins=(PAGE, "http://localhost:3000"))
    replies = [
        await preflight(args, origin=origin),
        await Client(FakeLLM(), args).post(PATH, TEXT, origin=origin),
        await Client(FakeLLM(), args).post(PATH, TEXT),
    ]
    for reply in replies:
        assert not cors_headers(reply)
        assert varies(reply) == {"origin"}, "a cache must not give it to a page that is let in"
    assert (await preflight(args, origin="http://localhost:3000")).headers["access-control-allow-origin"]


async def test_what_else_a_preflight_may_ask_for() -> None:
    args = ServerArgs(allowed_origins=PAGE, allowed_methods="*", allowed_headers="*")  # type: ignore[arg-type]
    reply = await preflight(args, access_control_request_headers="authorization,x-stainless-os")
    assert reply.headers["access-control-allow-methods"] == "POST"
    assert reply.headers["access-control-allow-headers"] == "authorization,x-stainless-os"


async def test_an_options_request_that_is_no_preflight_needs_a_key() -> None:
    client = Client(FakeLLM(), ServerArgs(api_key="k", allowed_origins=(PAGE,)))
    for headers in ({}, {"origin": PAGE}, {"access-control-request-method": "POST"}):
        assert (await client.call("OPTIONS", PATH, b"", headers)).status == 401


def full() -> FakeLLM:
    llm = FakeLLM()
    llm.no_room = OverloadedError("full")
    return llm


@pytest.mark.parametrize(
    ("llm", "content", "key", "status"),
    [
        (FakeLLM(), TEXT, "k", 200),
        (FakeLLM(), TEXT | {"stream": True}, "k", 200),
        (FakeLLM(), {}, "k", 400),
        (FakeLLM(), TEXT, "wrong", 401),
        (FakeLLM(), TEXT | {"model": "none"}, "k", 404),
        (FakeLLM(), TEXT | {"prompt": "x" * 2000}, "k", 413),
        (FakeLLM(Answer(error=ZeroDivisionError())), TEXT, "k", 500),
        (full(), TEXT, "k", 503),
    ],
)
async def test_a_page_can_read_every_answer(llm: FakeLLM, content: Any, key: str, status: int) -> None:
    args = ServerArgs(api_key="k", allowed_origins=(PAGE,), allow_credentials=True, max_body_size=1000)
    reply = await Client(llm, args).post(PATH, content, origin=PAGE, authorization=f"Bearer {key}")
    assert reply.status == status
    assert cors_headers(reply) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-credentials": "true",
        "access-control-expose-headers": "X-Request-Id, Retry-After",
    }
    assert "origin" in varies(reply)


async def test_a_page_can_read_that_it_asks_too_often() -> None:
    args = ServerArgs(allowed_origins=(PAGE,), max_requests_per_minute_per_key=1)
    client = Client(FakeLLM(), args)
    replies = [await client.post(PATH, TEXT, origin=PAGE) for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 429]
    assert replies[1].headers["access-control-allow-origin"] == PAGE


async def test_all_pages_may_be_let_in() -> None:
    args = ServerArgs(allowed_origins=("*",))
    reply = await Client(FakeLLM(), args).post(PATH, TEXT, origin="https://any.example")
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "vary" not in reply.headers
    assert (await preflight(args)).headers["access-control-allow-origin"] == "*"
    assert not cors_headers(await Client(FakeLLM(), args).post(PATH, TEXT))


@pytest.mark.parametrize(
    "origin",
    [
        f"{PAGE}/",
        f"{PAGE}/app",
        "page.example",
        '["*"]',
        "https://a,https://b",
        "**",
        "HTTPS://a",
        "https://Page.example",
        "https://*.example",
        "https://a@b",
        "https://a?b",
        "https://page.example:443",
        "http://page.example:80",
        "http://[::1]:80",
        "https://",
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(InvalidConfigError, match="allowed_origins must be"):
        ServerArgs(allowed_origins=(origin,))


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "http://[::1]:8080",
        "null",
        "chrome-extension://abc",
        "https://xn--bcher-kva.example:80",
    ],
)
def test_origins_that_browsers_send(origin: str) -> None:
    assert ServerArgs(allowed_origins=(origin,)).allowed_origins == (origin,)
