"""Who may open a WebSocket."""

from __future__ import annotations

from typing import Any

import pytest
import quart
from quart import g

from helpers_http import Reply, Server, serving
from helpers_websocket import handshake, open_websocket
from trioserve import ServerArgs
from trioserve.server.api_keys import ApiKeys
from trioserve.server.auth import client_of_request, require_keys
from trioserve.server.cors import allow_origins
from trioserve.server.errors import install_error_handler
from trioserve.server.request_scope import App
from trioserve.server.service import identify_requests


def make_app(**options: Any) -> App:
    args = ServerArgs(**options)
    app = App(__name__)
    install_error_handler(app)
    identify_requests(app)
    allow_origins(app, args)
    require_keys(app, ApiKeys.of(args), ())

    @app.websocket("/who")
    async def who() -> None:
        offered = quart.websocket.requested_subprotocols
        await quart.websocket.accept(subprotocol="realtime" if "realtime" in offered else None)
        await quart.websocket.send(f"{client_of_request().partition(':')[0]} {g.request_id}")

    return app


async def ask(server: Server, *headers: str) -> Reply:
    return await server.ask(handshake("/who", *headers))


@pytest.mark.parametrize(
    "headers",
    [
        ["Authorization: Bearer secret"],
        ["X-Api-Key: secret"],
        ["Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.secret, openai-beta.realtime-v1"],
        ["Sec-WebSocket-Protocol: openai-insecure-api-key.secret", "Sec-WebSocket-Protocol: realtime"],
    ],
)
async def test_a_key_opens(headers: list[str]) -> None:
    async with serving(make_app(api_key="secret")) as server:
        client = await open_websocket(server, "/who", "X-Request-Id: mine", *headers)
        assert await client.message() == "key mine"
        assert "secret" not in str(client.head)
        assert client.head.get("sec-websocket-protocol") in {"realtime", None}


@pytest.mark.parametrize(
    "headers",
    [
        [],
        ["Authorization: Bearer wrong"],
        ["Sec-WebSocket-Protocol: realtime"],
        ["Sec-WebSocket-Protocol: openai-insecure-api-key.wrong"],
        ["Authorization: Bearer wrong", "Sec-WebSocket-Protocol: openai-insecure-api-key.secret"],
    ],
)
async def test_without_the_key_there_is_a_401(headers: list[str]) -> None:
    async with serving(make_app(api_key="secret")) as server:
        reply = await ask(server, "X-Request-Id: mine", *headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert reply.headers["x-request-id"] == "mine"
        assert (await server.ask(handshake("/nowhere"))).status == 401


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ((), "http://test"),  # the page's own server: what the client's Host says
        (("https://app.example.com",), "https://app.example.com"),
        (("https://app.example.com",), "http://test"),
        (("null",), "null"),
        (("*",), "https://evil.example.com"),
    ],
)
async def test_pages_of_these_origins_may(allowed: tuple[str, ...], origin: str) -> None:
    async with serving(make_app(allowed_origins=allowed)) as server:
        client = await open_websocket(server, "/who", f"Origin: {origin}")
        assert str(await client.message()).startswith("address ")


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ((), "https://evil.example.com"),
        ((), "null"),
        ((), "http://test:81"),
        ((), "http://test.evil.example.com"),
        (("https://app.example.com",), "https://app.example.com.evil.com"),
        (("https://app.example.com",), "http://app.example.com"),
    ],
)
async def test_pages_of_others_may_not(allowed: tuple[str, ...], origin: str) -> None:
    async with serving(make_app(allowed_origins=allowed)) as server:
        reply = await ask(server, f"Origin: {origin}")
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
