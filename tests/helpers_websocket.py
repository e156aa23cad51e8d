"""A WebSocket client that can break every rule, and an application that tells what happens to it."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import attrs
import quart
import trio
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

from helpers_http import DEADLINE, Client, Server, get
from trioserve.server.errors import install_error_handler
from trioserve.server.request_scope import App
from trioserve.server.websocket.scope import current_websocket

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""Both are the example of RFC 6455, section 1.3."""

TEXT, BINARY, CLOSE, PING, PONG, CONTINUATION = 1, 2, 8, 9, 10, 0


def handshake(path: str, *headers: str, version: str = "13", key: str = KEY) -> bytes:
    return get(
        path,
        "Connection: keep-alive, Upgrade",
        "Upgrade: WebSocket",
        f"Sec-WebSocket-Version: {version}",
        f"Sec-WebSocket-Key: {key}",
        *headers,
    )


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    reserved: int = 0,
    masked: bool = True,
    length: int | None = None,
) -> bytes:
    """`length` is what the frame says of its payload."""
    length = len(payload) if length is None else length
    mask_bit = 128 if masked else 0
    head = bytes([(128 if fin else 0) | reserved << 4 | opcode])
    if length < 126:
        head += bytes([mask_bit | length])
    elif length < 65536:
        head += bytes([mask_bit | 126]) + struct.pack("!H", length)
    else:
        head += bytes([mask_bit | 127]) + struct.pack("!Q", length)
    if not masked:
        return head + payload
    mask = os.urandom(4)
    return head + mask + bytes(byte ^ mask[n % 4] for n, byte in enumerate(payload))


@attrs.define
class WebsocketClient:
    client: Client
    head: dict[str, str]
    """Of the answer to the handshake."""
    _frames: Connection = attrs.field(factory=lambda: Connection(ConnectionType.CLIENT))
    _events: list[Event] = attrs.field(factory=list)

    async def send(self, data: bytes) -> None:
        await self.client.send(data)

    async def text(self, text: str) -> None:
        await self.send(frame(TEXT, text.encode()))

    async def next(self) -> Event | None:
        """What comes next; None at the end."""
        with trio.fail_after(DEADLINE):
            while not self._events:
                data = await self._read()
                if not data:
                    return None
                self._frames.receive_data(data)
                self._events += self._frames.events()
        return self._events.pop(0)

    async def _read(self) -> bytes:
        if self.client._buffer:
            return self.client._take(len(self.client._buffer))
        try:
            return await self.client.stream.receive_some(65536)
        except trio.BrokenResourceError:
            return b""

    async def message(self) -> str | bytes:
        """The next message, whole; pings are passed over."""
        parts: list[str | bytes] = []
        while True:
            event = await self.next()
            if isinstance(event, Ping | Pong):
                continue
            assert isinstance(event, TextMessage | BytesMessage), event
            parts.append(event.data)
            if event.message_finished:
                return b"".join(parts) if isinstance(event.data, bytes | bytearray) else "".join(parts)

    async def closing(self) -> tuple[int, str]:
        """The close frame that comes next, which is the last thing that comes."""
        event = await self.next()
        assert isinstance(event, CloseConnection), event
        assert await self.next() is None
        return int(event.code), event.reason or ""


async def open_websocket(
    server: Server, path: str, *headers: str, receive_buffer: int | None = None
) -> WebsocketClient:
    client = await server.connect(receive_buffer)
    await client.send(handshake(path, *headers))
    with trio.fail_after(DEADLINE):
        status, head = await client.read_head()
    assert status == 101, status
    return WebsocketClient(client, head)


class WebsocketProbe:
    """An application, and what becomes of its WebSockets.

    `entered` is set when a handler runs, `left` when its scope ends.
    """

    def __init__(self) -> None:
        self.app = App(__name__)
        install_error_handler(self.app)
        self.open = 0
        self.most_open = 0
        self.app.count_websockets = self._count
        self.entered = trio.Event()
        self.left = trio.Event()
        self.taken: list[str | bytes] = []
        self.take = trio.Semaphore(0)
        self._took = trio.lowlevel.ParkingLot()
        self.app.websocket("/echo")(self.echo)
        self.app.websocket("/wait")(self.wait)
        self.app.websocket("/take")(self.take_some)
        self.app.websocket("/flood")(self.flood)
        self.app.websocket("/fail")(self.fail)
        self.app.websocket("/refuse")(self.refuse)
        self.app.websocket("/return")(self.return_)
        self.app.websocket("/until-drained")(self.until_drained)
        self.app.get("/hello")(self.hello)

    def _count(self, change: int) -> None:
        self.open += change
        self.most_open = max(self.open, self.most_open)

    def _enter(self) -> None:
        self.entered.set()
        current_websocket().stack.callback(self.left.set)

    async def hello(self) -> str:
        return "hello"

    async def echo(self) -> None:
        self._enter()
        offered = quart.websocket.requested_subprotocols
        await quart.websocket.accept(subprotocol=offered[0] if offered else None)
        while True:
            await quart.websocket.send(await quart.websocket.receive())

    async def wait(self) -> None:
        self._enter()
        await quart.websocket.accept()
        await trio.sleep_forever()

    async def take_some(self) -> None:
        """One message for each release of `take`."""
        self._enter()
        await quart.websocket.accept()
        while True:
            await self.take.acquire()
            self.taken.append(await quart.websocket.receive())
            self._took.unpark_all()

    async def wait_taken(self, count: int) -> None:
        with trio.fail_after(DEADLINE):
            while len(self.taken) < count:
                await self._took.park()

    async def flood(self) -> None:
        self._enter()
        while True:
            await quart.websocket.send(b"x" * 65536)

    async def fail(self) -> None:
        self._enter()
        await quart.websocket.accept()
        raise RuntimeError("on purpose")

    async def refuse(self) -> tuple[dict[str, str], int]:
        self._enter()
        return {"no": "thanks"}, 401

    async def return_(self) -> None:
        self._enter()
        await quart.websocket.send("bye")

    async def until_drained(self) -> None:
        self._enter()
        await quart.websocket.accept()
        await current_websocket().draining.wait()
        await quart.websocket.send("last words")
        await quart.websocket.close(1001, "going")

    async def wait_left(self) -> None:
        with trio.fail_after(DEADLINE):
            await self.left.wait()


async def echoes(server: Server, frames: Sequence[bytes]) -> WebsocketClient:
    """A client of /echo that has sent these."""
    client = await open_websocket(server, "/echo")
    for data in frames:
        await client.send(data)
    return client
