"""One WebSocket: the call of the ASGI application, and the scope that ends it."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import unquote

import trio
from hypercorn.protocol.events import Body, EndBody, Event, Response, StreamClosed
from hypercorn.typing import ASGIReceiveEvent, ASGISendEvent, ConnectionState
from hypercorn.utils import UnexpectedMessageError, build_and_validate_headers, suppress_body
from wsproto.frame_protocol import CloseReason

from trioserve.server.http_context import Address, ServingContext, error_body
from trioserve.server.request_stream import CLIENT_CLOSED_REQUEST, STREAM_ID
from trioserve.server.websocket.inbox import Inbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    import h11
    from hypercorn.typing import TaskGroup

    from trioserve.server.websocket.frames import WebsocketProtocol
    from trioserve.server.websocket.handshake import Handshake

__all__ = ["DRAINING", "HttpSide", "WebsocketStream"]

DRAINING = "trioserve.draining"
"""An extension of ASGI: `scope["extensions"][DRAINING]["event"]` is set when the server begins to shut down.
A WebSocket that has nothing to do then closes with 1001; what is left is cancelled at the end."""

# Messages that wait for the application, in bytes. One more message, of any size, is always taken.
_MAX_INBOX = 64 * 1024


class HttpSide(Protocol):
    """What the handshake asks of HTTP/1.1."""

    async def send_event(self, event: Event) -> None:
        """Send an event of a response, which refuses the handshake."""

    async def switch(self, headers: list[tuple[bytes, bytes]], stream: WebsocketStream) -> WebsocketProtocol:
        """Send the 101, and leave the connection."""


class _State(Enum):
    HANDSHAKE = auto()
    REFUSING = auto()  # a response has begun
    OPEN = auto()
    CLOSED = auto()


class WebsocketStream:
    """Runs the application for one WebSocket, inside a cancel scope.

    The scope is cancelled as soon as the client leaves, by a close frame or without one: what it sent and the
    application has not taken by then is dropped. An application that has closed the WebSocket itself, or
    refused it, is left to finish.
    """

    def __init__(
        self,
        context: ServingContext,
        tasks: TaskGroup,
        addresses: tuple[Address, Address],
        http: HttpSide,
        handshake: Handshake,
    ) -> None:
        """`addresses` are the client's and the server's."""
        self._context = context
        self._tasks = tasks
        self._client, self._server = addresses
        self._http = http
        self._handshake = handshake
        self._state = _State.HANDSHAKE
        self._status = CLIENT_CLOSED_REQUEST
        self._closed = False  # nothing can be sent any more
        self._close_code = int(CloseReason.ABNORMAL_CLOSURE)
        self._websocket: WebsocketProtocol | None = None
        self._greeted = False
        self._inbox = Inbox(_MAX_INBOX)
        self._call = trio.CancelScope()
        self._draining = trio.Event()
        self._path = b""
        self._response_headers: list[tuple[bytes, bytes]] = []

    def begin(self, request: h11.Request, target: bytes) -> None:
        """Start the application in a task of its own. `target` is the request's, in origin form."""
        self._tasks.spawn(self._run, self._make_scope(request, target))

    async def handle(self, event: Event) -> None:
        """Of the handshake's HTTP: it has no body, and there is nothing to do."""

    def part(self, status: int | None = None) -> None:
        """Part client and application: what runs is cancelled, unless it has said its last word.

        `status` is what the client is told in HTTP, where that does not come from the application. Never
        waits.
        """
        if self._closed:
            return
        self._status = status or self._status
        is_over = self._state is _State.CLOSED
        self._end()
        if not is_over:
            self._call.cancel()

    def drain(self) -> None:
        self._draining.set()

    @property
    def is_full(self) -> bool:
        return self._inbox.is_full

    async def put(self, message: str | bytes, size: int) -> None:
        is_text = isinstance(message, str)
        event = {
            "type": "websocket.receive",
            "text": message if is_text else None,
            "bytes": None if is_text else message,
        }
        await self._inbox.put(event, size)  # type: ignore[arg-type]  # hypercorn wants them in other types

    async def app_send(self, event: ASGISendEvent) -> None:
        """Take a message of the application."""
        message = cast("Mapping[str, Any]", event)  # of keys that go by its type
        if self._closed or self._state is _State.CLOSED:
            await trio.lowlevel.checkpoint()  # nobody is left to read it
            return
        match self._state, message["type"]:
            case _State.HANDSHAKE, "websocket.accept":
                await self._accept(message)
            case _State.HANDSHAKE, "websocket.close":
                await self._refuse(503 if self._context.draining else 403)
            case _State.HANDSHAKE, "websocket.http.response.start":
                await self._begin_refusal(message)
            case _State.REFUSING, "websocket.http.response.body":
                await self._continue_refusal(message)
            case _State.OPEN, "websocket.send":
                await self._send(message)
            case _State.OPEN, "websocket.close":
                await self._close(int(message.get("code") or 1000), message.get("reason") or "")
            case _:
                raise UnexpectedMessageError(self._state, message["type"])

    def _make_scope(self, request: h11.Request, target: bytes) -> dict[str, object]:
        self._path, _, query = target.partition(b"?")
        return {
            "type": "websocket",
            "http_version": "1.1",
            "asgi": {"spec_version": "2.3", "version": "3.0"},
            "scheme": "ws" if self._context.certificates is None else "wss",
            "path": unquote(self._path.decode()),
            "raw_path": self._path,
            "query_string": query,
            "root_path": self._context.config.root_path,
            "headers": list(request.headers),
            "client": self._client,
            "server": self._server,
            "subprotocols": list(self._handshake.subprotocols),
            "state": ConnectionState(self._context.state.copy()),
            "extensions": {"websocket.http.response": {}, DRAINING: {"event": self._draining}},
        }

    async def _run(self, scope: dict[str, object]) -> None:
        started = trio.current_time()
        try:
            with self._call:
                await self._call_app(scope)
                await self._end_call()
        finally:
            self._end()
            seconds = trio.current_time() - started
            self._context.log_access("GET", self._path.decode(), self._status, seconds, self._client)

    async def _call_app(self, scope: dict[str, object]) -> None:
        # A group may hold errors beside the cancellation: the errors are logged, the cancellation goes on.
        try:
            await self._context.app(
                scope,  # type: ignore[arg-type]  # a TypedDict
                self._receive,
                self.app_send,
                trio.to_thread.run_sync,
                trio.from_thread.run,
            )
        except* Exception as errors:
            path = self._path.decode()
            self._context.failures.report("the application failed on the WebSocket %s", path, error=errors)

    async def _receive(self) -> ASGIReceiveEvent:
        if not self._greeted:
            self._greeted = True
            await trio.lowlevel.checkpoint()
            return {"type": "websocket.connect"}
        message = await self._inbox.get()
        return message or {"type": "websocket.disconnect", "code": self._close_code}

    async def _end_call(self) -> None:
        """The application has returned."""
        if self._closed:
            return
        match self._state:
            case _State.HANDSHAKE:
                await self._refuse(500)
            case _State.OPEN:
                await self._close(CloseReason.INTERNAL_ERROR, "")
            case _State.REFUSING:  # cut short
                await self._http.send_event(StreamClosed(stream_id=STREAM_ID))

    def _end(self) -> None:
        self._closed = True
        self._inbox.close()

    # Before the handshake is through

    async def _accept(self, message: Mapping[str, Any]) -> None:
        headers = self._handshake.accept(message.get("subprotocol"))
        headers += build_and_validate_headers(message.get("headers") or [])
        self._state, self._status = _State.OPEN, 101
        self._websocket = await self._http.switch(headers, self)
        if self._context.draining:
            self.drain()

    async def _refuse(self, status: int) -> None:
        body = error_body(status)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._begin_refusal({"status": status, "headers": headers})
        await self._continue_refusal({"body": body})

    async def _begin_refusal(self, message: Mapping[str, Any]) -> None:
        self._state, self._status = _State.REFUSING, int(message["status"])
        headers = build_and_validate_headers(message["headers"])
        await self._http.send_event(Response(stream_id=STREAM_ID, headers=headers, status_code=self._status))

    async def _continue_refusal(self, message: Mapping[str, Any]) -> None:
        body = bytes(message.get("body", b""))
        if body and not suppress_body("GET", self._status):
            await self._http.send_event(Body(stream_id=STREAM_ID, data=body))
        if not message.get("more_body", False):
            self._state = _State.CLOSED
            await self._http.send_event(EndBody(stream_id=STREAM_ID))
            await self._http.send_event(StreamClosed(stream_id=STREAM_ID))

    # After it

    async def _send(self, message: Mapping[str, Any]) -> None:
        assert self._websocket is not None
        data = message.get("bytes")
        if data is None:
            data = message["text"]
        await self._websocket.send(data if isinstance(data, str) else bytes(data))

    async def _close(self, code: int, reason: str) -> None:
        assert self._websocket is not None
        self._state, self._close_code = _State.CLOSED, code
        websocket = self._websocket
        self._inbox.close()
        await websocket.close(code, reason)
