"""The bytes of a connection: as they are, or through TLS."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Protocol

import trio

__all__ = ["GONE", "ByteStream", "PlainBytes", "SocketBytes", "TlsBytes", "write_now"]

GONE = (OSError, trio.ClosedResourceError, trio.BrokenResourceError)
"""What a read or a write raises when the client, or we ourselves, have closed the connection."""

# A TLS write tells of progress once in so many bytes: four records.
_TLS_PIECE = 64 * 1024


class ByteStream(Protocol):
    """What a connection needs of its socket. The socket itself is the connection's to close."""

    def send_now(self, data: bytes) -> int:
        """Hand over as much of `data` as goes without waiting; 0 is always a right answer.

        Raises:
          OSError: the connection is broken or closed.
        """

    async def send(self, data: memoryview) -> int:
        """Wait until some of `data` is handed over; returns how many bytes.

        A cancelled call may leave a TLS stream unusable. Raises one of `GONE`.
        """

    async def receive(self, max_bytes: int) -> bytes:
        """Wait for bytes; empty when the client is gone or has closed its sending side. May be cancelled."""

    async def end(self) -> None:
        """Tell the client that nothing more comes. What it sends can still be read from the socket."""


class PlainBytes:
    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock

    def send_now(self, data: bytes) -> int:
        return write_now(self._socket, data)

    async def send(self, data: memoryview) -> int:
        return await self._socket.send(data)

    async def receive(self, max_bytes: int) -> bytes:
        try:
            return await self._socket.recv(max_bytes)
        except GONE:
            return b""

    async def end(self) -> None:
        await trio.lowlevel.checkpoint()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


class TlsBytes:
    """A handshake that is done, and what follows. Two tasks must not `send` at a time."""

    def __init__(self, stream: trio.SSLStream[SocketBytes]) -> None:
        self._stream = stream

    def send_now(self, data: bytes) -> int:
        return 0

    async def send(self, data: memoryview) -> int:
        piece = data[:_TLS_PIECE]
        await self._stream.send_all(piece)
        return len(piece)

    async def receive(self, max_bytes: int) -> bytes:
        try:
            return bytes(await self._stream.receive_some(max_bytes))
        except GONE:  # also an end without close_notify: HTTP says itself where a message ends
            return b""

    async def end(self) -> None:
        with suppress(*GONE):
            await self._stream.aclose()  # close_notify, then `SocketBytes.aclose`


class SocketBytes(trio.abc.Stream):
    """The encrypted bytes under a TLS stream. Closing it ends the sending side only."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[await self._socket.send(rest) :]
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def wait_send_all_might_not_block(self) -> None:
        await self._socket.wait_writable()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            return await self._socket.recv(max_bytes or _TLS_PIECE)
        except OSError as error:
            raise trio.BrokenResourceError from error

    async def aclose(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        await trio.lowlevel.checkpoint()


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
