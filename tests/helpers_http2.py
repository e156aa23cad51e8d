"""Frames of HTTP/2, byte by byte, and a server that speaks it."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import h2.errors
import h2.events
import hpack
import trio
import trio.testing

from helpers_http import DEADLINE, serving

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from helpers_http import Probe, Server
    from helpers_tls import Authority, Http2Client


def serving_http2(probe: Probe, authority: Authority, **options: Any) -> AbstractAsyncContextManager[Server]:
    return serving(probe.app, certificates=authority.certificates(http2=True), **options)


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.02)


def small_buffers() -> socket.socket:
    """A listener on whose connections the kernel takes little ahead of the client."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # they inherit it
    return listener


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """RFC 9113, section 4.1."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def head(changes: dict[bytes, bytes | None]) -> bytes:
    usual = {b":method": b"GET", b":scheme": b"https", b":path": b"/hello", b":authority": b"localhost"}
    headers = {name: value for name, value in (usual | changes).items() if value is not None}
    ordered = sorted(headers.items(), key=lambda item: not item[0].startswith(b":"))
    return hpack.Encoder().encode(ordered)


async def last_words(client: Http2Client, data: bytes) -> h2.events.ConnectionTerminated:
    """The GOAWAY that answers `data`, whatever else comes before it."""
    received = bytearray()

    async def send() -> None:
        with suppress(trio.BrokenResourceError):
            await client.send_raw(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        with trio.fail_after(DEADLINE):
            while part := await client.client.stream.receive_some():
                received += part
    *_, goaway = (payload for kind, payload in split_frames(bytes(received)) if kind == 7)
    end = h2.events.ConnectionTerminated()
    end.error_code = h2.errors.ErrorCodes(int.from_bytes(goaway[4:8], "big"))
    return end


def split_frames(data: bytes) -> list[tuple[int, bytes]]:
    frames = []
    while data:
        size = int.from_bytes(data[:3], "big")
        frames.append((data[3], data[9 : 9 + size]))
        data = data[9 + size :]
    return frames


__all__ = ["frame", "head", "last_words", "serving_http2", "settle", "small_buffers", "split_frames"]
