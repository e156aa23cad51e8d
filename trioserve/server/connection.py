"""One TCP or Unix connection: reads, writes, times, and the radius of its failures."""

from __future__ import annotations

import math
import socket
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import trio
from hypercorn.trio.task_group import TaskGroup
from hypercorn.utils import parse_socket_addr

from trioserve.server.byte_streams import GONE, PlainBytes, SocketBytes, TlsBytes
from trioserve.server.h2_protocol import Http2Protocol
from trioserve.server.h11_protocol import Http1Protocol
from trioserve.server.http_context import MAX_DISCARD, error_body, format_address
from trioserve.server.websocket.frames import WebsocketProtocol

if TYPE_CHECKING:
    from hypercorn.typing import TaskGroup as AnyTaskGroup

    from trioserve.server.byte_streams import ByteStream
    from trioserve.server.connection_room import NoRoom
    from trioserve.server.http_context import Address, ServingContext
    from trioserve.server.request_stream import Unsent

__all__ = ["Connection"]

_MAX_READ = 64 * 1024

# A task that never waits elsewhere lets the others run once in so many writes.
_WRITES_PER_CHECKPOINT = 16

# Seconds in which an idle connection takes the last bytes that it gets.
_GOODBYE_TIMEOUT = 1.0


_TURNED_AWAY = b"""\
HTTP/1.1 %d %b\r
content-type: application/json\r
content-length: %d\r
retry-after: 1\r
connection: close\r
\r
"""


class Connection:
    """Serves requests until the client leaves, is idle for too long, breaks the protocol, or is drained.

    Owns the socket, the nursery of the requests' tasks, and the reader, which is the task that calls `run`.
    The reader reads all the time, so it sees at once when the client leaves, and cancels its request. A
    client that closes only its sending side counts as gone.
    """

    def __init__(self, context: ServingContext, stream: trio.SocketStream) -> None:
        self._context = context
        self._socket = stream.socket
        self._bytes: ByteStream = PlainBytes(self._socket)
        # None until it is known, by TLS, or by a first byte: connections that wait are many, and cost little.
        self._protocol: Http1Protocol | Http2Protocol | WebsocketProtocol | None = None
        self._write_lock = trio.Lock()  # held only by a write that has to wait
        self._writes = 0
        # Ends the reader: its deadline is the idle timeout between requests, and the patience of a close.
        self._reading = trio.CancelScope()
        self._waiting = trio.CancelScope()  # around each receive: cancelled when the reader has other work
        self._idle = True
        self._closing = False
        self._lingers = False  # whether to read on once all is written

    async def run(self) -> None:
        """Serve to the end.

        Raises nothing that a client or an application can cause: an `Exception` is logged, and closes this
        connection alone. `Cancelled` and `KeyboardInterrupt` pass.
        """
        addresses = _addresses(self._socket)
        if addresses is None:
            self._socket.close()
            return
        with self._context.room.place(addresses[0]) as no_room:
            try:
                if no_room is not None:
                    self._turn_away(no_room, addresses[0])
                else:
                    await self._serve(addresses)
            except* Exception as errors:
                peer = format_address(addresses[0])
                self._context.failures.report("the connection of %s failed", peer, error=errors)
            finally:
                self._socket.close()

    def drain(self) -> None:
        """Close now if idle. A request whose head has begun to arrive will be answered with 503. A
        WebSocket is its application's to close."""
        if isinstance(self._protocol, Http2Protocol | WebsocketProtocol):
            self._protocol.drain()
        elif self._idle and not (self._protocol and self._protocol.has_unparsed_bytes):
            self._reading.cancel()

    def set_idle(self, idle: bool) -> None:
        self._idle = idle
        timeout = self._context.limits.keep_alive_timeout
        self._reading.deadline = trio.current_time() + timeout if idle else math.inf

    def resume(self) -> None:
        self._waiting.cancel()

    def switch(self, protocol: WebsocketProtocol) -> None:
        self._protocol = protocol
        self.resume()

    def close(self) -> None:
        """Write no more, and end once the client cannot lose what was written.

        Closing a socket that has unread bytes resets the connection, and a client that is still sending
        would not get to read its response. So the rest is read and dropped, up to a bound in bytes and time.
        """
        if self._closing:
            return
        self._closing = True
        self._lingers = self._protocol is not None and self._protocol.expects_more
        self._reading.deadline = trio.current_time() + self._context.limits.keep_alive_timeout
        self._waiting.cancel()

    async def write(self, data: bytes) -> None:
        """Send all of `data`, or drop it if the client is gone.

        Always lets a cancellation in; lets other tasks run where it has to wait, and now and then.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            sent = 0 if self._write_lock.locked() else self._bytes.send_now(data)
        except OSError:
            self._give_up()
            await trio.lowlevel.checkpoint()
            return
        if sent < len(data):
            await self._write_rest(memoryview(data)[sent:])
            return
        self._writes += 1
        if not self._writes % _WRITES_PER_CHECKPOINT:
            await trio.lowlevel.checkpoint()

    def write_now(self, data: bytes) -> Unsent | None:
        """Send all of `data`, or return what sends what is left of it. In any task."""
        try:
            sent = 0 if self._write_lock.locked() else self._bytes.send_now(data)
        except OSError:
            sent = 0  # `write` will find the same
        if sent == len(data):
            return None
        return partial(self._write_rest, memoryview(data)[sent:]) if sent else partial(self.write, data)

    async def _serve(self, addresses: tuple[Address, Address]) -> None:
        async with TaskGroup() as tasks:
            self._context.connections.add(self)
            try:
                with self._reading:
                    await self._read(tasks, addresses)
                self._part()
                if self._reading.cancelled_caught and not self._closing:
                    await self._say_goodbye()
            finally:
                self._context.connections.discard(self)
                self._part()
                self._socket.close()

    async def _read(self, tasks: AnyTaskGroup, addresses: tuple[Address, Address]) -> None:
        if self._context.certificates is not None and not await self._secure(tasks, addresses):
            return
        self.set_idle(True)
        while not self._closing:
            data = await self._receive()
            if data == b"":
                return
            if self._protocol is None:
                self._protocol = Http1Protocol(self._context, tasks, addresses, self)
            if data is None:
                await self._protocol.parse()
            else:
                await self._protocol.receive(data)
        await self._finish()

    async def _secure(self, tasks: AnyTaskGroup, addresses: tuple[Address, Address]) -> bool:
        """Shake hands; whether that went well. What went wrong is the client's affair, and not logged."""
        assert self._context.certificates is not None
        settings = self._context.certificates.current()
        stream = trio.SSLStream(SocketBytes(self._socket), settings, server_side=True)
        self._reading.deadline = trio.current_time() + self._context.limits.handshake_timeout
        try:
            await stream.do_handshake()
        except GONE:
            return False
        self._bytes = TlsBytes(stream)
        if stream.selected_alpn_protocol() == "h2":
            self._protocol = Http2Protocol(self._context, tasks, addresses, self)
            self._protocol.begin()
        return True

    def _part(self) -> None:
        """Cancel what runs for the client: it is gone, or was told that nothing more comes."""
        if self._protocol is not None:
            self._protocol.client_left()

    async def _say_goodbye(self) -> None:
        """End a connection that was idle for too long, or when the server shuts down."""
        with trio.move_on_after(_GOODBYE_TIMEOUT):
            if isinstance(self._protocol, Http2Protocol):
                await self.write(self._protocol.farewell())
            await self._bytes.end()

    async def _finish(self) -> None:
        async with self._write_lock:
            await self._bytes.end()
        if self._lingers:
            await self._discard()

    async def _discard(self) -> None:
        discarded = 0
        with suppress(*GONE):
            while discarded < MAX_DISCARD and (data := await self._socket.recv(_MAX_READ)):
                discarded += len(data)

    async def _receive(self) -> bytes | None:
        """Bytes of the client; empty when it is gone; None to go on with what was received before."""
        with trio.CancelScope() as self._waiting:
            return await self._bytes.receive(_MAX_READ)
        return None

    async def _write_rest(self, rest: memoryview) -> None:
        """Send what the kernel did not take at once."""
        try:
            with suppress(*GONE, trio.TooSlowError):
                async with self._write_lock:
                    while rest:
                        with trio.fail_after(self._context.limits.write_timeout):
                            sent = await self._bytes.send(rest)
                        rest = rest[sent:]
        finally:
            if rest:  # a part of a message is on the wire: nothing can follow it
                self._give_up()

    def _turn_away(self, refusal: NoRoom, client: Address) -> None:
        """Say why, without waiting or reading a request. Through TLS that cannot be said."""
        self._context.turned_away.report("no room for a connection of %s", format_address(client))
        if self._context.count_refusal is not None:
            self._context.count_refusal(refusal.reason)
        if self._context.certificates is not None:
            return
        body = error_body(refusal.status, refusal.message, refusal.code)
        head = _TURNED_AWAY % (refusal.status, HTTPStatus(refusal.status).phrase.encode(), len(body))
        with suppress(*GONE, BlockingIOError):
            self._bytes.send_now(head + body)
            self._socket.shutdown(socket.SHUT_WR)

    def _give_up(self) -> None:
        """End without a word: the client is gone, or does not read."""
        self._closing = True
        self._socket.close()
        self._reading.cancel()


def _addresses(sock: trio.socket.SocketType) -> tuple[Address, Address] | None:
    """The client's and the server's address, or None when the client is gone already."""
    try:
        peer, own = sock.getpeername(), sock.getsockname()
    except OSError:
        return None
    return parse_socket_addr(sock.family, peer), parse_socket_addr(sock.family, own)
