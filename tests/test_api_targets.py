"""What a request's first lines may be: methods, paths, queries, hosts and peers of every kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers_api import Client, Exchange, FakeLLM, Reply

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "Hi"}).encode()


async def ask(path: str = PATH, method: str = "POST", host: bytes = b"testserver", **scope: Any) -> Reply:
    exchange = Exchange(Client(FakeLLM()).app, method, path, BODY, {"content-type": "application/json"})
    exchange._scope.update(scope)
    exchange._scope["headers"][0] = (b"host", host)
    await exchange.run()
    return exchange.reply


@pytest.mark.parametrize(
    "path",
    ["/v1//completions", f"{PATH}/", f"{PATH}//", "/v1/./completions", "/v1/x/../completions",
     "/V1/completions", f"{PATH}\0", f"{PATH};a=b", f"{PATH}?n=2", "/", "*", f"/v1/models/small/{PATH}//"],
)  # fmt: skip
async def test_a_path_is_right_or_unknown(path: str) -> None:
    """No redirect: its target would be up to the Host header."""
    reply = await ask(path)
    assert reply.status in {404, 405}
    assert reply.error["code"] in {"unknown_url", "method_not_supported"}
    assert "location" not in reply.headers


@pytest.mark.parametrize(
    "host",
    [
        b"",
        b"a b",
        b"a..b",
        b"." * 70,
        b"a" * 300,
        b"\xff",
        "ü.example".encode(),
        b"[::1",
        b"x:99999999",
        b"a/b",
    ],
)
async def test_the_host_does_not_matter(host: bytes) -> None:
    assert (await ask(host=host)).status == 200


@pytest.mark.parametrize("query", [b"a=%ff&&=;", b"\xff\xfe", b"n=5&model=other&stream=true", b"&" * 10_000])
async def test_the_query_does_not_matter(query: bytes) -> None:
    reply = await ask(query_string=query)
    assert reply.status == 200
    assert len(reply.json["choices"]) == 1


@pytest.mark.parametrize(
    "peer",
    [
        None,
        (None, 0),
        ("", 0),
        ["10.0.0.1", 1],
        ("unix:/run/socket", 0),
        ("::ffff:10.0.0.1", 1),
        ("fe80::1%eth0", 1),
    ],
)
async def test_every_peer_is_served(peer: Any) -> None:
    assert (await ask(client=peer)).status == 200


@pytest.mark.parametrize(
    ("method", "path"), [("BREW" * 1000, PATH), ("BREW" * 1000, "/nothing"), ("GET", "/x" * 1000)]
)
async def test_an_error_repeats_little(method: str, path: str) -> None:
    reply = await ask(path, method)
    assert reply.status in {404, 405}
    assert len(reply.body) < 500


@pytest.mark.parametrize("path", ["/v1/models", "/nothing"])
async def test_a_websocket_is_refused(path: str) -> None:
    exchange = Exchange(Client(FakeLLM()).app, "GET", path, b"", {})
    exchange._scope |= {"type": "websocket", "scheme": "ws", "subprotocols": []}
    exchange._messages = [{"type": "websocket.connect"}]
    await exchange.run()
    assert [message["type"] for message in exchange._sent] == ["websocket.close"]


async def test_below_a_root_path() -> None:
    assert (await ask(f"/llm{PATH}", root_path="/llm")).status == 200
    assert (await ask(PATH, root_path="/llm")).status == 404


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions/batch", {"POST"}),
        ("/v1/chat/completions/render", {"POST"}),
        ("/v1/chat/completions/chatcmpl-1", {"GET", "HEAD", "POST", "DELETE"}),
        ("/v1/responses/input_tokens", {"POST"}),
        ("/v1/responses/compact", {"POST"}),
        ("/v1/responses/resp_1", {"GET", "HEAD", "DELETE"}),
    ],
)
async def test_options_lists_what_the_resource_itself_takes(path: str, methods: set[str]) -> None:
    reply = await ask(path, "OPTIONS")
    assert set(reply.headers["allow"].split(", ")) == methods | {"OPTIONS"}
