"""How a WebSocket begins, or does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from websockets.exceptions import InvalidStatus
from websockets.trio.client import connect

from helpers_http import DEADLINE, get, post, serving, stock_hypercorn
from helpers_websocket import ACCEPT, KEY, WebsocketProbe, frame, handshake, open_websocket

if TYPE_CHECKING:
    from helpers_tls import Authority

UPGRADE = ("Connection: Upgrade", "Upgrade: websocket")


async def test_the_example_of_the_standard() -> None:
    async with serving(WebsocketProbe().app) as server:
        websocket = await open_websocket(server, "/echo")
        assert websocket.head["sec-websocket-accept"] == ACCEPT
        assert websocket.head["upgrade"].lower() == "websocket"
        assert websocket.head["connection"].lower() == "upgrade"
        assert "sec-websocket-extensions" not in websocket.head
        assert "sec-websocket-protocol" not in websocket.head
        await websocket.text("hello")
        assert await websocket.message() == "hello"


async def test_a_client_of_others() -> None:
    async with serving(WebsocketProbe().app) as server:
        async with connect(f"ws://127.0.0.1:{server.address[1]}/echo", subprotocols=["a", "b"]) as client:
            assert client.subprotocol == "a"
            for message in ("text, ünïcode \U0001f399", "", b"bytes", b"", b"x" * 1_000_000):
                await client.send(message)
                assert await client.recv() == message
            await client.send(["in ", "several ", "frames"])
            assert await client.recv() == "in several frames"
            with trio.fail_after(DEADLINE):
                await (await client.ping()).wait()
        assert client.close_code == 1000


async def test_through_tls(authority: Authority) -> None:
    async with serving(WebsocketProbe().app, certificates=authority.certificates()) as server:
        url = f"wss://localhost:{server.address[1]}/echo"
        async with connect(url, ssl=authority.client()) as client:
            await client.send("hello" * 100_000)
            assert await client.recv() == "hello" * 100_000
        assert client.close_code == 1000


async def test_under_another_server() -> None:
    probe = WebsocketProbe()
    async with stock_hypercorn(probe.app) as (host, port):
        async with connect(f"ws://{host}:{port}/echo") as client:
            await client.send("hello")
            assert await client.recv() == "hello"
        await probe.wait_left()
        with pytest.raises(InvalidStatus) as caught:
            async with connect(f"ws://{host}:{port}/refuse"):
                pass
        assert caught.value.response.status_code == 401


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (handshake("/echo", version="8"), 426),
        (handshake("/echo", version="13, 8"), 426),
        (get("/echo", *UPGRADE, f"Sec-WebSocket-Key: {KEY}"), 426),
        (get("/echo", *UPGRADE, "Sec-WebSocket-Version: 13"), 400),
        (handshake("/echo", key="short"), 400),
        (handshake("/echo", key="a" * 24), 400),
        (handshake("/echo", key="*" * 22 + "=="), 400),
        (handshake("/echo", f"Sec-WebSocket-Key: {KEY}"), 400),
        (handshake("/echo", "Content-Length: 5") + b"hello", 400),
        (handshake("/echo", "Transfer-Encoding: chunked"), 400),
    ],
)
async def test_a_wrong_handshake(request_: bytes, status: int) -> None:
    probe = WebsocketProbe()
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(request_)
        reply = await client.read_reply()
        assert reply.status == status
        assert reply.error["message"]
        if status == 426:
            assert reply.headers["sec-websocket-version"] == "13"
            assert reply.headers["upgrade"] == "websocket"
        assert await client.read_to_end() == b""
    assert not probe.entered.is_set()


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [("/nowhere", 404, "unknown_url"), ("/hello", 400, "no_websocket")],
)
async def test_a_handshake_at_another_path(path: str, status: int, code: str) -> None:
    async with serving(WebsocketProbe().app) as server:
        client = await server.connect()
        await client.send(handshake(path))
        reply = await client.read_reply()
        assert (reply.status, reply.error["code"]) == (status, code)
        await client.send(get("/hello"))  # the connection goes on
        assert (await client.read_reply()).body == b"hello"


async def test_a_refusal_is_a_response() -> None:
    async with serving(WebsocketProbe().app) as server:
        client = await server.connect()
        await client.send(handshake("/refuse"))
        reply = await client.read_reply()
        assert (reply.status, reply.body) == (401, b'{"no":"thanks"}\n')
        await client.send(handshake("/echo"))
        assert (await client.read_head())[0] == 101


@pytest.mark.parametrize(
    "request_",
    [
        get("/hello", "Upgrade: websocket"),
        get("/hello", "Connection: upgrade", "Upgrade: h2c"),
        handshake("/hello").replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
)
async def test_what_does_not_ask_for_a_websocket_is_a_request(request_: bytes) -> None:
    async with serving(WebsocketProbe().app) as server:
        assert (await server.ask(request_)).body == b"hello"


async def test_other_requests_for_a_websocket() -> None:
    async with serving(WebsocketProbe().app) as server:
        reply = await server.ask(get("/echo"))
        assert (reply.status, reply.error["code"]) == (400, "websocket_expected")
        request = post("/echo", b"hello", *UPGRADE, "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {KEY}")
        assert (await server.ask(request)).status == 405


async def test_frames_may_come_with_the_handshake() -> None:
    async with serving(WebsocketProbe().app) as server:
        client = await server.connect()
        await client.send(handshake("/return") + frame(1, b"early"))
        await client.read_head()
        websocket = await open_websocket(server, "/echo")
        await websocket.text("late")
        assert await websocket.message() == "late"
        early = await server.connect()
        await early.send(handshake("/echo") + frame(1, b"early"))
        await early.read_head()
        assert await early._exactly(7) == frame(1, b"early", masked=False)


async def test_too_much_before_the_handshake_is_through() -> None:
    probe = WebsocketProbe()

    @probe.app.websocket("/slow")
    async def slow() -> None:
        probe._enter()
        await trio.sleep_forever()

    async with serving(probe.app, max_pipelined_bytes=1000) as server:
        client = await server.connect()
        await client.send(handshake("/slow"))
        await probe.entered.wait()
        await client.send(bytes(2000))
        await probe.wait_left()


async def test_no_further_websocket_while_the_server_drains() -> None:
    probe = WebsocketProbe()
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(handshake("/echo")[:20])
        await trio.testing.wait_all_tasks_blocked(0.01)
        server.shutdown.set()
        await trio.testing.wait_all_tasks_blocked()
        await client.send(handshake("/echo")[20:])
        assert (await client.read_reply()).status == 503
