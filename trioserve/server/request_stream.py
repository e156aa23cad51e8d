"""One HTTP request: the call of the ASGI application, and the scope that ends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

import trio
from hypercorn.protocol.events import Body, EndBody, Event, Response, StreamClosed
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.typing import ASGIReceiveEvent, ASGISendEvent, ConnectionState
from hypercorn.utils import suppress_body

from trioserve.server.http_context import Address, ServingContext, error_body
from trioserve.server.request_ids import REQUEST_ID_HEADER, given_request_id

if TYPE_CHECKING:
    import h11
    from hypercorn.typing import TaskGroup

__all__ = ["CLIENT_CLOSED_REQUEST", "SEND_NOW", "STREAM_ID", "RequestStream", "SendNow", "Unsent"]

STREAM_ID = 1

_RESPONSE = ASGIHTTPState.RESPONSE

CLIENT_CLOSED_REQUEST = 499
"""In the access log: the client left before there was a status (nginx's number)."""

# Parts of a request's body that wait for the application; each is at most one read, 64 KiB.
_MAX_INBOX = 10

SEND_NOW = "trioserve.send_now"
"""An extension of ASGI: `scope["extensions"][SEND_NOW]["send_now"]` is a `SendNow`, if there is one."""

Unsent = Callable[[], Awaitable[None]]
"""Sends what is left of a part of a body. The request's task must call it before it sends anything else, and
without a checkpoint in between."""

SendNow = Callable[[bytes], Unsent | None]
"""Sends a part of a body, in any task and without waiting, where a message of ASGI would be sent by the
request's own task. None: all of it was sent."""


class RequestStream(HTTPStream):
    """Runs the application for one request, inside a cancel scope.

    The scope is cancelled when the client leaves before the response is complete. An application that has
    given its whole response is left to finish by itself.

    Relies on hypercorn's `HTTPStream`: `app_send` turns the application's messages into events for `send`,
    `state` says how far the response is, `app_put` takes the parts of the body, `_send_error_response`
    answers where the application did not.
    """

    def __init__(
        self,
        context: ServingContext,
        task_group: TaskGroup,
        addresses: tuple[Address, Address],
        send: Callable[[Event], Awaitable[None]],
        *,
        stream_id: int = STREAM_ID,
        max_inbox: float = _MAX_INBOX,
        send_now: SendNow | None = None,
    ) -> None:
        """`addresses` are the client's and the server's; `send` takes the events of the response, and
        `send_now` parts of its body, where the protocol can do that.

        So many parts of the body as `max_inbox` wait for the application; a further one waits in `handle`.
        """
        secure = context.certificates is not None
        super().__init__(
            context.app, context.config, context.worker, task_group, secure, *addresses, send, stream_id
        )
        self._context = context
        self._status = CLIENT_CLOSED_REQUEST
        self._has_body = True  # of the response
        self._send_now = send_now
        self._call = trio.CancelScope()
        self._to_app, self._for_app = trio.open_memory_channel[ASGIReceiveEvent](max_inbox)
        self.app_put = self._put

    def begin(self, request: h11.Request, target: bytes) -> None:
        """Start the application in a task of its own. `target` is the request's, in origin form."""
        version = request.http_version.decode()
        self.start(request.method.decode().upper(), target, list(request.headers), http_version=version)

    def start(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], *, http_version: str
    ) -> None:
        """As `begin`."""
        path, _, query = target.partition(b"?")
        self.start_time = trio.current_time()
        self.scope = {
            "type": "http",
            "http_version": http_version,
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": method,
            "scheme": self.scheme,
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "root_path": self.config.root_path,
            "headers": headers,
            "client": self.client,
            "server": self.server,
            "state": ConnectionState(self._context.state.copy()),
            "extensions": {} if self._send_now is None else {SEND_NOW: {"send_now": self.send_now}},
        }
        self.task_group.spawn(self._run)

    async def handle(self, event: Event) -> None:
        if isinstance(event, StreamClosed):
            self.part()
        else:
            await super().handle(event)

    def part(self, status: int | None = None) -> None:
        """Part client and request: the application is cancelled unless its response is complete.

        `status` is what the client is told, where that does not come from the application. Never waits, so
        that it also works in a cancelled task.
        """
        if self.closed:
            return
        self.closed = True
        self._status = status or self._status
        if self.state is not ASGIHTTPState.CLOSED:
            self._call.cancel()
        self._to_app.close()

    async def app_send(self, message: ASGISendEvent | None) -> None:
        """Take a message of the application; None when it has returned."""
        if message is not None:
            if self.closed:
                await trio.lowlevel.checkpoint()  # nobody is left to read it
                return
            if message["type"] == "http.response.start":
                self._status = int(message["status"])
                self._has_body = not suppress_body(self.scope["method"], self._status)
            elif message.get("more_body") and not (self._has_body and message.get("body")):
                # Nothing goes out: one that waits for nothing else would hold up everybody.
                await trio.lowlevel.checkpoint()
        await super().app_send(message)

    def send_now(self, part: bytes) -> Unsent | None:
        """Send a part of the body, not empty, that more will follow: see `SendNow`."""
        if self._send_now is None or self.closed or not self._has_body or self.state is not _RESPONSE:
            return partial(self.app_send, {"type": "http.response.body", "body": part, "more_body": True})
        return self._send_now(part)

    async def _run(self) -> None:
        try:
            with self._call:
                await self._call_app()
                await self.app_send(None)
        finally:
            self._for_app.close()
            seconds = trio.current_time() - self.start_time
            path = self.scope["raw_path"].decode()
            self._context.log_access(self.scope["method"], path, self._status, seconds, self.client)

    async def _call_app(self) -> None:
        # A group may hold errors beside the cancellation: the errors are logged, the cancellation goes on.
        try:
            await self.app(
                self.scope, self._receive, self.app_send, trio.to_thread.run_sync, trio.from_thread.run
            )
        except* Exception as errors:
            method, path = self.scope["method"], self.scope["raw_path"].decode()
            self._context.failures.report("the application failed on %s %s", method, path, error=errors)

    async def _receive(self) -> ASGIReceiveEvent:
        try:
            return await self._for_app.receive()
        except trio.EndOfChannel:
            return {"type": "http.disconnect"}

    async def _put(self, message: ASGIReceiveEvent) -> None:
        # When the application or the client is done with the request, nobody wants the rest of its body.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._to_app.send(message)

    async def _send_error_response(self, status_code: int) -> None:
        self._status = status_code
        body = error_body(status_code)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if request_id := given_request_id(self.scope["headers"]):
            headers.append((REQUEST_ID_HEADER, request_id))
        await self.send(Response(stream_id=self.stream_id, headers=headers, status_code=status_code))
        if not suppress_body(self.scope["method"], status_code):
            await self.send(Body(stream_id=self.stream_id, data=body))
        await self.send(EndBody(stream_id=self.stream_id))
        self.state = ASGIHTTPState.CLOSED
