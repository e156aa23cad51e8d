"""A link that goes wrong at a chosen message: a proxy between a client and an engine core, both real."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

import trioserve.async_llm
from cancel_worlds import HashRunner, hash_model, patch_core
from trioserve import AsyncLLM, EngineArgs
from trioserve.link.client import EngineCoreClient, shake_hands
from trioserve.link.core_server import serve_core
from trioserve.link.framing import MAX_FRAME_SIZE, frame
from trioserve.link.message_stream import MessageStream
from trioserve.link.messages import Abort, Refused, encode_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

__all__ = [
    "DEADLY",
    "HARMLESS",
    "STALLED",
    "TO_CLIENT",
    "TO_CORE",
    "WRONG_MESSAGE",
    "Fault",
    "Proxy",
    "message_stream",
    "open_llm_over",
    "socket_stream",
]

TO_CLIENT, TO_CORE = "to the client", "to the core"


@attrs.frozen
class Fault:
    """What becomes of a frame on its way: `strike` sends what it likes to its reader, and returns whether
    the link goes on as before."""

    name: str
    strike: Callable[[trio.SocketStream, bytes], Awaitable[bool]]


def _instead(data: Callable[[bytes], bytes]) -> Callable[[trio.SocketStream, bytes], Awaitable[bool]]:
    """Other bytes in a frame's place, and nothing after them."""

    async def strike(reader: trio.SocketStream, message: bytes) -> bool:
        await reader.send_all(data(message))
        return False

    return strike


def _then_end(data: Callable[[bytes], bytes]) -> Callable[[trio.SocketStream, bytes], Awaitable[bool]]:
    async def strike(reader: trio.SocketStream, message: bytes) -> bool:
        await reader.send_all(data(message))
        await reader.send_eof()
        return False

    return strike


async def _by_the_byte(reader: trio.SocketStream, message: bytes) -> bool:
    for number in range(len(message)):
        await reader.send_all(message[number : number + 1])
        await trio.lowlevel.checkpoint()
    return True


async def _never(reader: trio.SocketStream, message: bytes) -> bool:
    await trio.sleep_forever()
    raise AssertionError


async def _last_byte_late(reader: trio.SocketStream, message: bytes) -> bool:
    """All but the last byte now; that one comes when everybody waits for it."""
    await reader.send_all(message[:-1])
    await wait_all_tasks_blocked()
    await reader.send_all(message[-1:])
    return True


_HUGE = struct.pack("<I", MAX_FRAME_SIZE + 1)

DEADLY = [
    Fault("end of file", _then_end(lambda _: b"")),
    Fault("truncated in its length", _then_end(lambda message: message[:2])),
    Fault("truncated in its body", _then_end(lambda message: message[:-1])),
    Fault("oversized", _instead(lambda message: _HUGE + message)),
    Fault("an empty frame", _instead(lambda _: frame(b""))),
    Fault("garbage without frames", _instead(lambda _: b"GET / HTTP/1.1\r\n\r\n")),
    Fault("garbage in a frame", _instead(lambda message: frame(b"\xff" * len(message)))),
    Fault("a body that is cut", _instead(lambda message: frame(message[4:-1]))),
    Fault("a body that is too long", _instead(lambda message: frame(message[4:] + b"\x00"))),
]
"""The reader's link is over after each of these."""

HARMLESS = [
    Fault("byte by byte", _by_the_byte),
    Fault("the last byte late", _last_byte_late),
]
"""The reader gets the message all the same."""

STALLED = Fault("nobody reads any more", _never)

_ABORT = encode_message(Abort([1]))
_REFUSED = encode_message(Refused(request_id=1, message="no", parameter=None))
WRONG_MESSAGE = {
    TO_CLIENT: Fault(
        "a message of the wrong direction", _instead(lambda _: frame(encode_message(Abort([1]))))
    ),
    TO_CORE: Fault(
        "a message of the wrong direction",
        _instead(lambda _: frame(encode_message(Refused(request_id=1, message="no", parameter=None)))),
    ),
}


@attrs.define(eq=False)
class Proxy:
    """Passes frames both ways. Once armed it counts those of one direction, and strikes at one of them."""

    fault: Fault
    direction: str
    number: int | None
    """Of the frame, from 1 on; None: each of them; 0: none."""
    has_struck: bool = False
    _is_armed: bool = False
    _num_passed: int = 0

    def arm(self) -> None:
        self._is_armed = True

    def disarm(self) -> None:
        self._is_armed = False

    async def run(self, client: trio.SocketStream, core: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pass, core, client, TO_CLIENT)
            nursery.start_soon(self._pass, client, core, TO_CORE)

    async def _pass(self, writer: trio.SocketStream, reader: trio.SocketStream, direction: str) -> None:
        buffer = bytearray()
        try:
            while True:
                while (message := _take_frame(buffer)) is not None:
                    if not await self._forward(message, reader, direction):
                        return
                data = await writer.receive_some(65536)
                if not data:
                    await reader.send_eof()
                    return
                buffer += data
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # an end is gone: there is nobody to pass anything to

    async def _forward(self, message: bytes, reader: trio.SocketStream, direction: str) -> bool:
        if self._is_armed and direction == self.direction:
            self._num_passed += 1
            if self.number in {None, self._num_passed}:
                self.has_struck = True
                return await self.fault.strike(reader, message)
        await reader.send_all(message)
        return True


def _take_frame(buffer: bytearray) -> bytes | None:
    if len(buffer) < 4:
        return None
    end = 4 + int.from_bytes(buffer[:4], "little")
    if len(buffer) < end:
        return None
    message = bytes(buffer[:end])
    del buffer[:end]
    return message


def socket_stream(end: socket.socket) -> trio.SocketStream:
    end.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(end))


def message_stream(end: socket.socket) -> MessageStream:
    return MessageStream(socket_stream(end))


@asynccontextmanager
async def open_llm_over(
    proxy: Proxy, directory: Path, monkeypatch: pytest.MonkeyPatch, **engine_args: Any
) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM whose link to a real core, in this process, goes through `proxy`."""
    model = hash_model(directory)
    patch_core(monkeypatch, HashRunner())
    monkeypatch.setattr(trioserve.async_llm, "resolve_model", lambda _: model)
    monkeypatch.setattr(trioserve.async_llm, "open_client", partial(_open_client, proxy))
    args = EngineArgs.from_dict({"model": "hash", "log": {"stats_interval": 0}, **engine_args})
    async with AsyncLLM.from_engine_args(args) as llm:
        yield llm


@asynccontextmanager
async def _open_client(proxy: Proxy, config: Any, model: Any) -> AsyncIterator[EngineCoreClient]:
    (client_end, near), (far, core_end) = socket.socketpair(), socket.socketpair()
    client, core = message_stream(client_end), message_stream(core_end)
    proxy_ends = socket_stream(near), socket_stream(far)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve, core)
            nursery.start_soon(client.run_writer)
            nursery.start_soon(proxy.run, *proxy_ends)
            yield EngineCoreClient(client, await shake_hands(client, config, model))
            nursery.cancel_scope.cancel()
    finally:
        for end in (client, core):
            end.close()
        for stream in proxy_ends:
            stream.socket.close()


async def _serve(core: MessageStream) -> None:
    try:
        await serve_core(core)
    finally:
        core.close()
