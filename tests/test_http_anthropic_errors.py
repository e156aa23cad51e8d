"""What is refused before it reaches the application is told in the words of its path's API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from helpers_http import Probe, post, serving
from helpers_http2 import serving_http2
from helpers_tls import Http2Client

if TYPE_CHECKING:
    from helpers_tls import Authority

PATHS = [
    ("/v1/messages?beta=true", "error"),
    ("/v1/messages/count_tokens", "error"),
    ("/v1/messages-of-others", None),
    ("/v1/chat/completions", None),
]


@pytest.mark.parametrize(("path", "kind"), PATHS)
async def test_a_body_that_is_too_large(probe: Probe, path: str, kind: str | None) -> None:
    async with serving(probe.app, max_body_size=1000) as server:
        client = await server.connect()
        await client.send(post(path, bytes(1001)))
        reply = await client.read_reply()
    assert reply.status == 413
    assert json.loads(reply.body).get("type") == kind
    assert reply.error["type"] == ("request_too_large" if kind else "invalid_request_error")


@pytest.mark.parametrize(("path", "kind"), PATHS)
async def test_a_body_that_is_too_large_on_http2(
    probe: Probe, authority: Authority, path: str, kind: str | None
) -> None:
    async with serving_http2(probe, authority, max_body_size=1000) as server:
        client = await Http2Client.connect(server, authority)
        reply = await client.ask(path, method="POST", content_length="1001")
    assert reply.status == 413
    assert json.loads(reply.body).get("type") == kind
