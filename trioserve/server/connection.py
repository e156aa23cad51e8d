"""One TCP or Unix connection: reads, writes, times, and the radius of its failures."""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import trio
from hypercorn.trio.task_group import TaskGroup
from hypercorn.utils import parse_socket_addr

from trioserve.server.h11_protocol import Http1Protocol
from trioserve.server.http_context import format_address

if TYPE_CHECKING:
    from trioserve.server.http_context import Address, ServingContext

__all__ = ["Connection", "write_now"]

_MAX_READ = 64 * 1024

# How much of an unwanted body is read, so that its sender gets to read why. In bytes.
_MAX_DISCARD = 64 * 1024 * 1024

# A task that never waits elsewhere lets the others run once in so many writes.
_WRITES_PER_CHECKPOINT = 16


class Connection:
    """Serves requests until the client leaves, is idle for too long, breaks the protocol, or is drained.

    Owns the socket, the nursery of the requests' tasks, and the reader, which is the task that calls `run`.
    The reader reads all the time, so it sees at once when the client leaves, and cancels its request. A
    client that closes only its sending side counts as gone.
    """

    def __init__(self, context: ServingContext, stream: trio.SocketStream) -> None:
        self._context = context
        self._socket = stream.socket
        self._write_lock = trio.Lock()  # held only by a write that has to wait
        self._writes = 0
        # Ends the reader: its deadline is the idle timeout between requests, and the patience of a close.
        self._reading = trio.CancelScope()
        self._waiting = trio.CancelScope()  # around each receive: cancelled when the reader has other work
        self._idle = True
        self._closing = False

    async def run(self) -> None:
        """Serve to the end.

        Raises nothing that a client or an application can cause: an `Exception` is logged, and closes this
        connection alone. `Cancelled` and `KeyboardInterrupt` pass.
        """
        addresses = _addresses(self._socket)
        if addresses is None:
            self._socket.close()
            return
        try:
            await self._serve(*addresses)
        except* Exception as errors:
            peer = format_address(addresses[0])
            self._context.failures.report("the connection of %s failed", peer, error=errors)
        finally:
            self._socket.close()

    def drain(self) -> None:
        """Close now if idle. A request whose head has begun to arrive will be answered with 503."""
        if self._idle and not self._protocol.has_unparsed_bytes:
            self._reading.cancel()

    def set_idle(self, idle: bool) -> None:
        self._idle = idle
        timeout = self._context.limits.keep_alive_timeout
        self._reading.deadline = trio.current_time() + timeout if idle else math.inf

    def resume(self) -> None:
        self._waiting.cancel()

    def close(self) -> None:
        """Write no more, and end once the client cannot lose what was written.

        Closing a socket that has unread bytes resets the connection, and a client that is still sending
        would not get to read its response. So the rest is read and dropped, up to a bound in bytes and time.
        """
        self._closing = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        if self._protocol.expects_more:
            self._reading.deadline = trio.current_time() + self._context.limits.keep_alive_timeout
        else:
            self._reading.cancel()

    async def write(self, data: bytes) -> None:
        """Send all of `data`, or drop it if the client is gone.

        Always lets a cancellation in; lets other tasks run where it has to wait, and now and then.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            sent = 0 if self._write_lock.locked() else write_now(self._socket, data)
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

    async def _serve(self, client: Address, server: Address) -> None:
        async with TaskGroup() as tasks:
            self._protocol = Http1Protocol(self._context, tasks, (client, server), self)
            self._context.connections.add(self)
            try:
                self.set_idle(True)
                with self._reading:
                    await self._read()
            finally:
                self._context.connections.discard(self)
                self._protocol.client_left()
                self._socket.close()

    async def _read(self) -> None:
        while not self._closing:
            data = await self._receive()
            if data is None:
                await self._protocol.parse()
            elif data:
                await self._protocol.receive(data)
            else:
                return
        await self._discard()

    async def _discard(self) -> None:
        discarded = 0
        while discarded < _MAX_DISCARD and (data := await self._receive()):
            discarded += len(data)

    async def _receive(self) -> bytes | None:
        """Bytes of the client; empty when it is gone; None to go on with what was received before."""
        with trio.CancelScope() as self._waiting:
            try:
                return await self._socket.recv(_MAX_READ)
            except (OSError, trio.ClosedResourceError):
                return b""
        return None

    async def _write_rest(self, rest: memoryview) -> None:
        """Send what the kernel did not take at once."""
        try:
            with suppress(OSError, trio.ClosedResourceError, trio.TooSlowError):
                async with self._write_lock:
                    while rest:
                        with trio.fail_after(self._context.limits.write_timeout):
                            sent = await self._socket.send(rest)
                        rest = rest[sent:]
        finally:
            if rest:  # a part of a message is on the wire: nothing can follow it
                self._give_up()

    def _give_up(self) -> None:
        """End without a word: the client is gone, or does not read."""
        self._closing = True
        self._socket.close()
        self._reading.cancel()


def write_now(sock: trio.socket.SocketType, data: bytes) -> int:
    """Hand `data` to the kernel, as far as it takes it now: no wait, no task switch.

    Returns the number of bytes taken. 0 is always a right answer: the caller then waits.

    Raises:
      OSError: the connection is broken or closed.
    """
    if os.name != "posix":
        return 0
    try:
        return os.write(sock.fileno(), data)
    except BlockingIOError:
        return 0


def _addresses(sock: trio.socket.SocketType) -> tuple[Address, Address] | None:
    """The client's and the server's address, or None when the client is gone already."""
    try:
        peer, own = sock.getpeername(), sock.getsockname()
    except OSError:
        return None
    return parse_socket_addr(sock.family, peer), parse_socket_addr(sock.family, own)
