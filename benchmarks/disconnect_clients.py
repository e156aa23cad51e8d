"""Clients for `disconnects.py`, and the ways in which they leave."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events
import trio

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    Way = Callable[["Client"], Awaitable[None]]

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds


class Client:
    """Over HTTP/1.1. `stream` is the socket's, or TLS on top of it."""

    def __init__(self, sock: trio.SocketStream, stream: trio.abc.Stream) -> None:
        self.socket = sock
        self.stream = stream

    async def begin(self) -> None:
        """Say what comes before the first request."""

    async def send(self, method: str, path: str, body: bytes = b"", missing: int = 0) -> None:
        """A request whose body lacks the last `missing` bytes."""
        head = f"{method} {path} HTTP/1.1\r\nhost: benchmark\r\ncontent-type: application/json\r\n"
        length = f"content-length: {len(body) + missing}\r\n\r\n"
        await self.stream.send_all((head + length).encode() + body)

    async def read_some(self) -> bytes:
        """Bytes of the answer.

        Raises:
          EOFError: the server has closed the connection.
        """
        if not (data := bytes(await self.stream.receive_some(65536))):
            raise EOFError
        return data

    async def close(self) -> None:
        self.socket.socket.close()

    async def half_close(self) -> None:
        self.socket.socket.shutdown(socket.SHUT_WR)

    async def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.socket.socket.close()


class Http2Client(Client):
    def __init__(self, sock: trio.SocketStream, stream: trio.abc.Stream) -> None:
        super().__init__(sock, stream)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))

    async def begin(self) -> None:
        self.h2.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        await self.stream.send_all(self.h2.data_to_send())

    async def send(self, method: str, path: str, body: bytes = b"", missing: int = 0) -> None:
        head = [(":method", method), (":scheme", "https"), (":authority", "benchmark"), (":path", path)]
        self.stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(self.stream_id, head, end_stream=not body and not missing)
        if body:
            self.h2.send_data(self.stream_id, body, end_stream=not missing)
        await self.flush()

    async def read_some(self) -> bytes:
        data = b""
        while not data:
            for event in self.h2.receive_data(await super().read_some()):
                if isinstance(event, h2.events.DataReceived):
                    data += event.data
        return data

    async def reset_stream(self) -> None:
        self.h2.reset_stream(self.stream_id, 8)
        await self.flush()

    async def go_away(self) -> None:
        self.h2.close_connection()
        await self.flush()


WAYS: dict[str, Way] = {"close": Client.close, "half-close": Client.half_close, "reset": Client.reset}
HTTP2_WAYS: dict[str, Way] = {**WAYS, "RST_STREAM": Http2Client.reset_stream, "GOAWAY": Http2Client.go_away}  # type: ignore[dict-item]


async def connect(
    address: tuple[str, int], kind: type[Client] = Client, tls: ssl.SSLContext | None = None
) -> Client:
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that writes to it block soon
    await sock.connect(address)
    plain = trio.SocketStream(sock)
    client = kind(plain, trio.SSLStream(plain, tls, server_hostname="localhost") if tls else plain)
    await client.begin()
    return client
