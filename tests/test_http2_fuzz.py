"""Frames of HTTP/2 in any order, well-formed or nearly so: each client harms only itself."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import hpack
import pytest
import trio

from helpers_http import DEADLINE, Client, Probe
from helpers_http2 import frame, serving_http2
from helpers_tls import Authority, Http2Client

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from helpers_http import Server

PATHS = (
    b"/hello",
    b"/wait",
    b"/echo",
    b"/stream/flood",
    b"/stream/trickle",
    b"/refuse",
    b"/missing",
    b"/\xff",
)
METHODS = (b"GET", b"POST", b"POST", b"HEAD", b"OPTIONS", b"get")
LENGTHS = (b"0", b"3", b"10", b"99999999999", b"-1")
INCREMENTS = (b"\0\0\0\1", b"\0\0\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\x7f\0\0\0")
SETTINGS = tuple(
    number.to_bytes(2, "big") + value.to_bytes(4, "big")
    for number, value in [
        (1, 0), (1, 65536), (2, 1), (3, 0), (4, 0), (4, 65536), (4, 2**31 - 1), (4, 2**32 - 1), (5, 16384),
        (5, 1), (6, 1), (8, 1), (0x9999, 1),
    ]
)  # fmt: skip


class Frames:
    """A client's frames, drawn one by one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.encoder = hpack.Encoder()
        self.next_stream = 1

    def draw(self) -> bytes:
        kinds: list[tuple[int, Callable[[], bytes]]] = [
            (35, self.headers),
            (20, self.data),
            (10, lambda: frame(3, 0, self.stream(), self.rng.choice((bytes(4), b"\0\0\0\x08", bytes(3))))),
            (13, lambda: frame(8, 0, self.stream(), self.rng.choice(INCREMENTS))),
            (10, lambda: frame(4, self.rng.choice((0, 0, 0, 1)), 0, self.rng.choice(SETTINGS))),
            (4, lambda: frame(6, self.rng.choice((0, 1)), 0, bytes(8))),
            (2, lambda: frame(7, 0, 0, bytes(8))),
            (2, lambda: frame(2, 0, self.stream(), bytes(3) + b"\1\1")),
            (1, lambda: frame(5, 4, self.stream(), bytes(4))),
            (3, self.anything),
        ]
        ((_, draw),) = self.rng.choices(kinds, [weight for weight, _ in kinds])
        return draw()

    def stream(self) -> int:
        return self.rng.choice((0, 1, 1, 2, 3, 5, 7, self.next_stream))

    def headers(self) -> bytes:
        rng = self.rng
        head = [(b":method", rng.choice(METHODS)), (b":scheme", b"https"), (b":authority", b"x")]
        head.append((b":path", rng.choice(PATHS)))
        if rng.random() < 0.2:
            head.append((b"content-length", rng.choice(LENGTHS)))
        block = self.encoder.encode(head)
        stream = self.next_stream if rng.random() < 0.9 else self.stream()
        if stream == self.next_stream:
            self.next_stream += 2
        flags = rng.choice((0, 1, 4, 4, 5, 5, 12, 36))
        if flags & 8:
            block = b"\3" + block + bytes(3)
        if flags & 32:
            block = bytes(5) + block
        if rng.random() < 0.85:
            return frame(1, flags, stream, block)
        cut = rng.randint(0, len(block))
        return frame(1, flags & ~4, stream, block[:cut]) + frame(9, 4, stream, block[cut:])

    def data(self) -> bytes:
        flags = self.rng.choice((0, 0, 1, 8, 9))
        body = bytes(self.rng.choice((0, 1, 3, 10, 100, 5000, 16000)))
        if flags & 8:
            body = bytes([self.rng.choice((0, 2, 255))]) + body + bytes(2)
        return frame(0, flags, self.stream(), body)

    def anything(self) -> bytes:
        rng = self.rng
        return frame(
            rng.randint(0, 12), rng.randint(0, 255), self.stream(), rng.randbytes(rng.randint(0, 30))
        )


def a_client_says(rng: random.Random) -> bytes:
    frames = Frames(rng)
    data = bytearray(b"".join(frames.draw() for _ in range(rng.randint(1, 40))))
    if rng.random() < 0.1:
        for _ in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


async def talk(server: Server, authority: Authority, rng: random.Random) -> None:
    """Say something in pieces, read or not, and leave."""
    data = a_client_says(rng)
    client = await Http2Client.connect(server, authority, receive_buffer=rng.choice((None, 4096)))
    stream = client.client.stream

    async def read() -> None:
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some(65536):
                pass

    async with trio.open_nursery() as nursery:
        if rng.random() < 0.7:
            nursery.start_soon(read)
        with suppress(trio.BrokenResourceError), trio.move_on_after(0.1):
            while data:
                size = rng.choice((len(data), rng.randint(1, 3000)))
                await stream.send_all(data[:size])
                data = data[size:]
        nursery.cancel_scope.cancel()
    with suppress(OSError):
        rng.choice((Client.close, Client.reset, Client.half_close))(client.client)
    client.client.close()


@pytest.mark.parametrize("seed", range(3))
async def test_any_frames(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    probe, authority = Probe(), Authority(tmp_path)
    async with serving_http2(probe, authority, write_timeout=1.0, max_connections=50) as server:
        for n in range(40):
            await talk(server, authority, random.Random(1000 * seed + n))
            assert not [record for record in caplog.records if record.levelname == "ERROR"], (seed, n)
            caplog.clear()
        # The places of all are free again.
        with trio.fail_after(DEADLINE):
            while True:
                with suppress(trio.BrokenResourceError, EOFError):
                    neighbours = [await Http2Client.connect(server, authority) for _ in range(50)]
                    for neighbour in neighbours:
                        assert (await neighbour.ask("/hello")).body == b"hello"
                    return
                server.close_clients()
                await trio.sleep(0.05)
