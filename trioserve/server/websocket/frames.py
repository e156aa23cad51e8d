"""A WebSocket on one connection: bytes to messages, messages to bytes, and whether the client is there."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Protocol

import trio
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason

if TYPE_CHECKING:
    from hypercorn.typing import TaskGroup

    from trioserve.server.h11_protocol import Transport
    from trioserve.server.http_context import HttpLimits

__all__ = ["MessageSink", "WebsocketProtocol"]

# Frames may be as small as six bytes. Others get their turn after so many bytes of them.
_PIECE = 4096

# Pings that came while a pong could not be sent; of more, the newest are answered (RFC 6455, section 5.5.3).
_MAX_PONGS = 16


class MessageSink(Protocol):
    """Who gets what the client sends."""

    @property
    def is_full(self) -> bool:
        """Whether `put` would wait."""

    async def put(self, message: str | bytes, size: int) -> None:
        """Take a whole message, of so many bytes."""

    def part(self) -> None:
        """Nothing more will come, and nothing can be sent. Never waits."""

    def drain(self) -> None:
        """The server shuts down. Never waits."""


class WebsocketProtocol:
    """Takes the place of HTTP/1.1 on its connection once a handshake was accepted.

    The frames are wsproto's. No extension is spoken, so nothing that a client sends grows here. A message of
    more than `limits.max_body_size` bytes ends the connection, as does whatever breaks the protocol; the
    client is told by a close code: 1002, 1007 (text that is not UTF-8) or 1009 (too big).

    `receive` and `parse` are for the connection's reader, `send` and `close` for the application's task.
    """

    expects_more = True
    """A close is read to its end, so that the client gets to read ours."""
    has_unparsed_bytes = False

    def __init__(
        self, limits: HttpLimits, transport: Transport, tasks: TaskGroup, sink: MessageSink, early: bytes
    ) -> None:
        """`early` is what the client sent before it knew that it may."""
        self._limits = limits
        self._transport = transport
        self._sink = sink
        self._early = early
        self._frames = Connection(ConnectionType.SERVER)
        self._message = bytearray()  # the part of one that is there; text as UTF-8
        self._closed = False
        self._pongs: deque[bytes] = deque(maxlen=_MAX_PONGS)
        self._heard_at = trio.current_time()
        self._asked_at: float | None = None  # of a ping, since which the client was not heard
        self._waking = trio.CancelScope()
        self._beating = trio.CancelScope()
        tasks.spawn(self._beat)

    # For the connection

    async def parse(self) -> None:
        """Take what came early."""
        await self.receive(b"")

    async def receive(self, data: bytes) -> None:
        """Take bytes of the client. Waits where the application does not keep up with them."""
        self._heard_at = trio.current_time()
        data, self._early = self._early + data, b""
        for start in range(0, len(data), _PIECE):
            if self._closed:
                return
            self._frames.receive_data(data[start : start + _PIECE])
            for event in self._frames.events():
                await self._take(event)
            await trio.lowlevel.checkpoint()

    def client_left(self) -> None:
        """No more bytes will come, because of the client, or because the server's patience is over: then the
        client is told, as far as that goes without waiting."""
        if not self._closed and self._frames.state is ConnectionState.OPEN:
            self._transport.write_now(self._encode(CloseConnection(code=CloseReason.GOING_AWAY)))
        self._end()
        self._sink.part()

    def drain(self) -> None:
        self._sink.drain()

    # For the application

    async def send(self, message: str | bytes) -> None:
        """Send a message, or drop it if nobody is left to read it. As `Transport.write` waits."""
        if not self._closed:
            event = TextMessage(data=message) if isinstance(message, str) else BytesMessage(data=message)
            await self._transport.write(self._encode(event))

    async def close(self, code: int, reason: str = "") -> None:
        """Say goodbye, and close: what the client still sends is not looked at."""
        if self._closed:
            return
        self._end()
        if self._frames.state in {ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING}:
            await self._transport.write(self._encode(CloseConnection(code=code, reason=reason)))
        self._transport.close()

    def _encode(self, event: Event) -> bytes:
        return bytes(self._frames.send(event))

    def _end(self) -> None:
        self._closed = True
        self._message.clear()
        self._pongs.clear()
        self._beating.cancel()

    async def _take(self, event: Event) -> None:
        match event:
            case TextMessage() | BytesMessage():
                await self._take_part(event)
            case Ping():
                self._pongs.append(bytes(event.payload))
                self._waking.cancel()
            case CloseConnection():  # the client's, or what wsproto has found wrong
                await self._close_for_client(event.code, event.reason or "")

    async def _take_part(self, event: TextMessage | BytesMessage) -> None:
        if self._closed:
            return
        is_text = isinstance(event, TextMessage)
        self._message += event.data.encode() if isinstance(event, TextMessage) else event.data
        if len(self._message) > self._limits.max_body_size:
            reason = f"A message may have {self._limits.max_body_size} bytes."
            await self._close_for_client(CloseReason.MESSAGE_TOO_BIG, reason)
        elif event.message_finished:
            message, self._message = bytes(self._message), bytearray()
            await self._sink.put(message.decode() if is_text else message, len(message))

    async def _close_for_client(self, code: int, reason: str) -> None:
        self._sink.part()
        await self.close(code, reason)

    # Whether the client is there

    async def _beat(self) -> None:
        """Answer pings, and send our own to a client that is silent; one that stays so is gone."""
        with self._beating:
            while (wait := self._time_to_beat()) is not None:
                if self._pongs:
                    await self._transport.write(self._encode(Pong(payload=self._pongs.popleft())))
                elif wait > 0:
                    with trio.move_on_after(wait) as self._waking:
                        await trio.sleep_forever()
                else:
                    self._asked_at = trio.current_time()
                    await self._transport.write(self._encode(Ping()))
        if not self._closed:
            self._sink.part()
            await self.close(CloseReason.INTERNAL_ERROR, "No answer to a ping.")

    def _time_to_beat(self) -> float | None:
        """Seconds until the next ping, or until its answer must have come. None: it has not come."""
        now = trio.current_time()
        if self._sink.is_full:  # then the client is not listened to
            self._heard_at = now
        if self._asked_at is not None and self._heard_at < self._asked_at:
            left = self._asked_at + self._limits.websocket_ping_timeout - now
            return left if left > 0 else None
        self._asked_at = None
        interval = self._limits.websocket_ping_interval
        return max(0.0, self._heard_at + interval - now) if interval else math.inf
