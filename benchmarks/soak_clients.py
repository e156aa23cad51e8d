"""The clients of a soak: some behave, some leave, some are slow, some send nonsense.

Each function is one client from its connection to its end, and returns what became of it, in one word; see
`EXPECTED` for the words that are right for each kind.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import attrs
import h11
import trio

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["EXPECTED", "KINDS", "Target", "UnexpectedError", "first", "run_client"]

_PATIENCE = 120.0
"""Seconds after which a client that still waits counts as lost."""

_WORDS = ("the", "sea", "was", "calm", "and", "an", "old", "ship", "went", "on", "towards", "some", "harbour")


class UnexpectedError(Exception):
    """The server did something that no client here provokes."""


@attrs.frozen
class Target:
    """A server, by address."""

    port: int
    key: str
    model: str

    async def connect(self, receive_buffer: int | None = None) -> Connection:
        sock = trio.socket.socket()
        try:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await sock.connect(("127.0.0.1", self.port))
        except BaseException:
            sock.close()
            raise
        return Connection(sock, self)


@attrs.define(eq=False)
class Connection:
    """HTTP/1.1 by h11, over one socket; closed by leaving its scope."""

    _socket: trio.socket.SocketType
    _target: Target
    _h11: h11.Connection = attrs.field(factory=lambda: h11.Connection(h11.CLIENT))
    status: int = 0

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    async def send_raw(self, data: bytes) -> None:
        await trio.SocketStream(self._socket).send_all(data)

    async def send(self, path: str, body: Any, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {
            "host": "soak",
            "content-type": "application/json",
            "content-length": str(len(content)),
            "authorization": f"Bearer {self._target.key}",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        request = h11.Request(method="POST", target=path, headers=list(all_headers.items()))
        data = self._h11.send(request) or b""
        await self.send_raw(data + (self._h11.send(h11.Data(data=content)) or b""))
        self._h11.send(h11.EndOfMessage())

    async def parts(self, size: int = 65536) -> AsyncIterator[bytes]:
        """The parts of the response's body as they come; `status` is set before the first one."""
        while True:
            event = self._h11.next_event()
            match event:
                case h11.NEED_DATA:
                    self._h11.receive_data(await self._socket.recv(size))
                case h11.Response():
                    self.status = event.status_code
                case h11.Data():
                    yield bytes(event.data)
                case h11.EndOfMessage():
                    return

    async def read_raw(self) -> bytes:
        """What comes next; empty at the end."""
        return await self._socket.recv(65536)

    async def answer(self) -> bytes:
        return b"".join([part async for part in self.parts()])


def _prompt(random_: random.Random) -> str:
    # Some prompts begin alike, so that the prefix cache has something to share.
    start = "Once upon a time " if random_.random() < 0.5 else ""
    return start + " ".join(random_.choices(_WORDS, k=int(random_.expovariate(1 / 60)) + 1))


def _request(target: Target, random_: random.Random, *, stream: bool) -> tuple[str, dict[str, Any]]:
    """A path and a body, of any shape that the API has."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": int(random_.expovariate(1 / 24)) + 1,
        "stream": stream,
        "temperature": random_.choice((0, 0.8, 1.2)),
    }
    if random_.random() < 0.2:
        body["n"] = random_.randint(2, 3)
    if random_.random() < 0.2:
        body["stop"] = ["ship", ". "]
    if random_.random() < 0.15:
        body["structured_outputs"] = {"regex": "(yes|no|[0-9]{1,8})"}
    if random_.random() < 0.5:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": _prompt(random_)}]}
    if random_.random() < 0.2:
        return "/v1/completions", body | {"prompt": [_prompt(random_) for _ in range(3)]}
    return "/v1/completions", body | {"prompt": _prompt(random_)}


def _code(body: bytes) -> str:
    """What an error object says it is."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError):
        raise UnexpectedError(f"no error object: {body[:200]!r}") from None
    return str(error["code"] or error["type"])


def _verdict(status: int, body: bytes) -> str:
    """The word for a whole answer."""
    if status == 200:
        if not body.startswith(b"data: ") and not body.startswith(b":"):
            json.loads(body)
            return "answered"
        frames = [frame for frame in body.decode().split("\n\n") if frame.startswith("data: ")]
        if frames[-1] != "data: [DONE]":
            raise UnexpectedError(f"a stream ended with {frames[-1][:200]!r}")
        last = json.loads(frames[-2].removeprefix("data: ")) if len(frames) > 1 else {}
        return _code(json.dumps(last).encode()) if "error" in last else "answered"
    return _code(body)


async def well_behaved(target: Target, random_: random.Random) -> str:
    """Asks, and reads to the end."""
    path, body = _request(target, random_, stream=random_.random() < 0.7)
    async with await target.connect() as connection:
        await connection.send(path, body)
        answer = await connection.answer()
    return _verdict(connection.status, answer)


async def first(target: Target, random_: random.Random) -> str:
    """Asks for what starts all that is started only when it is needed: the process that tries grammars."""
    body = {"prompt": "x", "max_tokens": 8, "structured_outputs": {"regex": "yes|no"}}
    async with await target.connect() as connection:
        await connection.send("/v1/completions", body)
        answer = await connection.answer()
    return _verdict(connection.status, answer)


async def leaving(target: Target, random_: random.Random) -> str:
    """Leaves at a random moment, in one of the ways there are."""
    path, body = _request(target, random_, stream=random_.random() < 0.7)
    async with await target.connect() as connection:
        await connection.send(path, body | {"max_tokens": 500, "ignore_eos": True})
        with trio.move_on_after(random_.expovariate(1 / 0.5)):
            answer = await connection.answer()
            return _verdict(connection.status, answer)
        random_.choice((connection.reset, connection.half_close, lambda: None))()
    return "left"


async def slow(target: Target, random_: random.Random) -> str:
    """Reads a few bytes at a time, and loses its patience in the end."""
    _, body = _request(target, random_, stream=True)
    body |= {"prompt": "x", "max_tokens": 400, "n": 4, "ignore_eos": True, "return_token_ids": True}
    body.pop("structured_outputs", None)
    body.pop("stop", None)
    body.pop("messages", None)
    async with await target.connect(receive_buffer=2048) as connection:
        await connection.send("/v1/completions", body)
        with trio.move_on_after(random_.uniform(1, 8)):
            received = b""
            async for part in connection.parts(size=256):
                received += part
                await trio.sleep(0.1)
            return _verdict(connection.status, received)
    return "left"


async def hurried(target: Target, random_: random.Random) -> str:
    """Sets a deadline that can hardly be met."""
    path, body = _request(target, random_, stream=random_.random() < 0.5)
    async with await target.connect() as connection:
        seconds = f"{random_.uniform(0.05, 1):.3f}"
        await connection.send(path, body | {"max_tokens": 500, "ignore_eos": True}, x_request_timeout=seconds)
        answer = await connection.answer()
    return _verdict(connection.status, answer)


_WRONG_BODIES: tuple[Any, ...] = (
    b"{",
    b"[" * 50_000,
    b'{"prompt": "x", "max_tokens": 1e400}',
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x " * 20_000},
    {"prompt": "x", "model": "no-such-model"},
    {"prompt": "x", "structured_outputs": {"regex": "(((((a{1,1000}){1,1000}){1,1000}"}},
    {"prompt": "x", "structured_outputs": {"json": {"type": "object", "properties": 5}}},
)

_WRONG_BYTES = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"\x00" * 200_000,
)


async def wrong(target: Target, random_: random.Random) -> str:
    """Sends what has to be refused."""
    async with await target.connect() as connection:
        if random_.random() < 0.3:
            await connection.send_raw(random_.choice(_WRONG_BYTES))
            connection.half_close()
            with trio.move_on_after(1):
                while await connection.read_raw():
                    pass
            return "refused"
        key = {"authorization": "Bearer wrong"} if random_.random() < 0.1 else {}
        await connection.send("/v1/completions", random_.choice(_WRONG_BODIES), **key)
        answer = await connection.answer()
    if connection.status in {400, 401, 404, 413}:
        return "refused"
    return _verdict(connection.status, answer)


KINDS: dict[Callable[[Target, random.Random], Awaitable[str]], int] = {
    well_behaved: 40,
    leaving: 30,
    slow: 5,
    hurried: 10,
    wrong: 15,
}
"""And how often each comes, relative to the others."""

_ALWAYS = {"overloaded", "rate_limit_exceeded"}
"""Pressure is told at the door, to anybody."""

EXPECTED = {
    first: {"answered"},
    well_behaved: _ALWAYS | {"answered", "deadline_exceeded"},
    leaving: _ALWAYS | {"answered", "deadline_exceeded", "left"},
    slow: _ALWAYS | {"answered", "deadline_exceeded", "left"},
    hurried: _ALWAYS | {"answered", "deadline_exceeded"},
    wrong: _ALWAYS | {"refused"},
}


async def run_client(
    kind: Callable[[Target, random.Random], Awaitable[str]], target: Target, random_: random.Random
) -> str:
    """Its word; or "lost" where the server said nothing for too long, and "broken" where it closed early."""
    try:
        with trio.fail_after(_PATIENCE):
            return await kind(target, random_)
    except trio.TooSlowError:
        return "lost"
    except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError):
        return "broken"
