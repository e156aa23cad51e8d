"""A raw HTTP/1.1 client, a server on a free port, and an application that tells what happens to it."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import quart
import trio
from hypercorn.config import Config
from hypercorn.trio import serve as serve_stock

from trioserve.server.errors import describe
from trioserve.server.framing import last_frames
from trioserve.server.http import HttpLimits, serve_http
from trioserve.server.request_scope import App, request_stack
from trioserve.server.sse import sse_response

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from hypercorn.typing import ASGIFramework

    from trioserve.server.tls import Certificates

DEADLINE = 10.0


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: test", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@attrs.frozen
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


@attrs.define
class Client:
    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]
    _buffer: bytearray = attrs.field(factory=bytearray)

    @property
    def socket(self) -> trio.socket.SocketType:
        return (
            self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        ).socket

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        self.socket.close()

    async def _more(self) -> None:
        data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError(bytes(self._buffer))
        self._buffer += data

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            await self._more()
        end = self._buffer.index(mark) + len(mark)
        return self._take(end)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        return self._take(size)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        start, *lines = (await self._until(b"\r\n\r\n")).decode().strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(start.split()[1]), {name.lower(): value for name, value in pairs}

    async def read_chunk(self) -> bytes:
        """One chunk; empty at the end."""
        size = int(await self._until(b"\r\n"), 16)
        data = await self._exactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def read_reply(self) -> Reply:
        with trio.fail_after(DEADLINE):
            status, headers = await self.read_head()
            if headers.get("transfer-encoding") != "chunked":
                return Reply(status, headers, await self._exactly(int(headers["content-length"])))
            body = b""
            while chunk := await self.read_chunk():
                body += chunk
            return Reply(status, headers, body)

    async def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        with trio.fail_after(DEADLINE):
            while data := await self.stream.receive_some(65536):
                self._buffer += data
        return self._take(len(self._buffer))


@attrs.define
class Server:
    listener: socket.socket
    address: Any
    shutdown: trio.Event = attrs.field(factory=trio.Event)
    returned: trio.Event = attrs.field(factory=trio.Event)
    _clients: list[Client] = attrs.field(factory=list)

    async def connect(
        self, receive_buffer: int | None = None, *, tls: ssl.SSLContext | None = None, name: str = "localhost"
    ) -> Client:
        """With `tls`, the handshake is done, and `name` is whom the server must be."""
        sock = trio.socket.socket(self.listener.family)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client = Client(trio.SocketStream(sock))
        self._clients.append(client)
        await sock.connect(self.address)
        if tls is not None:
            client.stream = trio.SSLStream(client.stream, tls, server_hostname=name)
            await client.stream.do_handshake()
        return client

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()

    async def ask(self, request: bytes) -> Reply:
        """One request on a connection of its own."""
        client = await self.connect()
        await client.send(request)
        reply = await client.read_reply()
        client.close()
        return reply


@asynccontextmanager
async def serving(
    app: ASGIFramework,
    *,
    listener: socket.socket | None = None,
    access_log: bool = False,
    certificates: Certificates | None = None,
    count_refusal: Callable[[str], None] | None = None,
    **limits: Any,
) -> AsyncIterator[Server]:
    """Serves `app` while the body runs; then whatever still runs is cancelled."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    server = Server(listener, listener.getsockname())

    serve = partial(
        serve_http,
        app,
        [listener],
        HttpLimits(**limits),
        shutdown=server.shutdown,
        access_log=access_log,
        certificates=certificates,
        count_refusal=count_refusal,
    )

    async def run(task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            task_status.started()
        server.returned.set()

    with trio.fail_after(3 * DEADLINE):
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            try:
                yield server
            finally:
                server.close_clients()
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def stock_hypercorn(app: ASGIFramework) -> AsyncIterator[tuple[str, int]]:
    """What `hypercorn -k trio` runs."""
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    config.graceful_timeout = 1.0
    shutdown = trio.Event()

    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            serve = partial(serve_stock, app, config, shutdown_trigger=shutdown.wait)
            (url,) = await nursery.start(serve)
            host, port = url.removeprefix("http://").split(":")
            yield host, int(port)
            shutdown.set()


class Gate:
    """A stream whose frames the test hands out: `b"data: 0\\n\\n"`, `b"data: 1\\n\\n"`, ..."""

    def __init__(self) -> None:
        self._open, self._frames = trio.open_memory_channel[bytes](1000)
        self._num = 0

    def let(self, count: int) -> bytes:
        """Let so many frames out; they are returned, joined."""
        frames = [b"data: %d\n\n" % n for n in range(self._num, self._num + count)]
        self._num += count
        for frame in frames:
            self._open.send_nowait(frame)
        return b"".join(frames)

    def end(self) -> None:
        self._open.close()

    async def next_frame(self) -> bytes | None:
        try:
            return await self._frames.receive()
        except trio.EndOfChannel:
            return None

    def last_frames(self, error: Exception) -> bytes:
        return last_frames(describe(error).detail)


class Flood:
    """A stream that never ends and never waits."""

    async def next_frame(self) -> bytes:
        return b"x" * 65536


class Trickle:
    async def next_frame(self) -> bytes:
        await trio.sleep(0.001)
        return b"data: x\n\n"


class Probe:
    """An application, and what becomes of its requests.

    `entered` is set when a handler runs, `left` when the scope of its request ends.
    """

    def __init__(self) -> None:
        self.app = App(__name__)
        self.gate = Gate()
        self.entered = trio.Event()
        self.left = trio.Event()
        self.app.get("/hello")(self.hello)
        self.app.post("/echo")(self.echo)
        self.app.get("/wait")(self.wait)
        self.app.get("/stream/<kind>")(self.stream)
        self.app.post("/refuse")(self.refuse)

    def _enter(self) -> None:
        self.entered.set()
        request_stack().callback(self.left.set)

    async def hello(self) -> str:
        return f"hello {quart.request.args.get('n', '')}".strip()

    async def echo(self) -> dict[str, int]:
        self._enter()
        return {"size": len(await quart.request.get_data())}

    async def refuse(self) -> tuple[str, int]:
        return "no", 401

    async def wait(self) -> str:
        self._enter()
        await trio.sleep_forever()
        raise AssertionError

    async def stream(self, kind: str) -> quart.Response:
        self._enter()
        source = {"gate": self.gate, "flood": Flood(), "trickle": Trickle()}[kind]
        return sse_response(source)

    async def wait_left(self) -> None:
        with trio.fail_after(DEADLINE):
            await self.left.wait()


async def start_stream(server: Server, path: str, **options: Any) -> Client:
    client = await server.connect(**options)
    await client.send(get(path))
    return client


__all__ = [
    "DEADLINE",
    "Client",
    "Gate",
    "Probe",
    "Reply",
    "Server",
    "get",
    "post",
    "serving",
    "start_stream",
    "stock_hypercorn",
]
