"""A quart-trio application whose requests are scopes: resources last from the handler to the last byte."""

from __future__ import annotations

import logging
import math
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import quart
import trio
from quart.routing import QuartRule
from quart.utils import encode_headers
from quart.wrappers import Response
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.datastructures import ImmutableDict

from trioserve.server.current_request import current_request
from trioserve.server.deadlines import TIMEOUT_HEADER, RequestDeadline, TimeLimits, read_timeout_header
from trioserve.server.errors import shutting_down
from trioserve.server.keep_alive import KeepAliveSender
from trioserve.server.request_stream import SEND_NOW
from trioserve.server.sse import FrameBody
from trioserve.server.websocket.scope import ScopedWebsocket, WebsocketConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
    from quart.ctx import RequestContext
    from quart.typing import ResponseReturnValue, ResponseTypes
    from quart.wrappers import Request
    from quart.wrappers.base import BaseRequestWebsocket
    from werkzeug.exceptions import HTTPException
    from werkzeug.routing import MapAdapter

    from trioserve.errors import TrioserveError

__all__ = [
    "GRACE",
    "App",
    "ScopedRequest",
    "limit_request",
    "request_deadline",
    "request_stack",
    "time_limits",
]

GRACE = 1.0
"""Seconds in which the client of a stream that was cut can still be told; then the connection is dropped."""

_logger = logging.getLogger("trioserve.http")


class ScopedRequest(TrioRequest):
    """A request with a deadline, and a stack for what it needs until its response is sent.

    `stack` closes in the request's own task, after the body and before the end of the response: a client
    that has seen the end of a chunked response knows that what served it is free. When the client leaves,
    the scope around handler, body and stack is cancelled; so what is on the stack cleans up without waiting,
    or shields itself. It is opened in one cancel scope and closed in another (see `deadlines`): nothing on it
    may hold a nursery or a cancel scope open.
    """

    stack: AsyncExitStack
    deadline: RequestDeadline

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.deadline = RequestDeadline()


def request_stack() -> AsyncExitStack:
    """The stack of the request, or WebSocket, that this task handles."""
    return cast("ScopedRequest | ScopedWebsocket", current_request()).stack


def request_deadline() -> RequestDeadline:
    """The deadline of the request that this task handles."""
    return cast("ScopedRequest", quart.request).deadline


def limit_request(seconds: float | None) -> None:
    """Allow the request that this task handles so many seconds, from its headers on; None: no such limit."""
    if seconds is not None:
        request_deadline().limit(seconds)


def time_limits() -> TimeLimits:
    """Those of the application that this task works for."""
    return cast("App", quart.current_app).time_limits


class _ScopedConnection(TrioASGIHTTPConnection):
    """One request: quart-trio's watcher, which cancels when the client leaves, beside the handler.

    Relies on quart's private `_create_request_from_scope`.
    """

    app: App

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        request = self._create_request_from_scope(send)
        if (limit := self.app.body_limits.get(request.path)) is not None:
            request.max_content_length = limit
            request.body = request.body_class(request.content_length, limit)
        self._sender = KeepAliveSender(
            partial(_send_part, send),
            self.app.time_limits.keep_alive_interval,
            (self.scope.get("extensions") or {}).get(SEND_NOW, {}).get("send_now"),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.handle_messages, nursery, request, receive)
            await self.handle_request(nursery, request, send)

    async def handle_messages(  # type: ignore[override]  # as in quart-trio
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        await self._sender.watch(partial(super().handle_messages, nursery, request, receive))

    async def handle_request(  # type: ignore[override]  # as in quart-trio
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        scoped = cast("ScopedRequest", request)
        is_whole = False
        with self.app.open_request(scoped.deadline):
            async with AsyncExitStack() as scoped.stack:
                response = await self.app.handle_request(request)
                with trio.move_on_after(self._timeout(response)):
                    is_whole = await self._send_head_and_body(send, response, scoped)
        # A server answers the last message with a disconnect, so the stack had to close before it.
        if is_whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        nursery.cancel_scope.cancel()

    def _timeout(self, response: ResponseTypes) -> float:
        timeout = self.app.config["RESPONSE_TIMEOUT"]
        if isinstance(response, Response) and response.timeout is not Ellipsis:
            timeout = response.timeout
        return math.inf if timeout is None else timeout

    async def _send_head_and_body(
        self, send: ASGISendCallable, response: ResponseTypes, request: ScopedRequest
    ) -> bool:
        """False if the client could not be told how the response ends."""
        headers = encode_headers(response.headers)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        if not isinstance(response, Response):
            for part in response.response:
                await _send_part(send, part)
            return True
        async with response.response as body:
            if isinstance(body, FrameBody):
                return await self._send_events(body, request)
            async for part in body:
                await _send_part(send, part)
        return True

    async def _send_events(self, body: FrameBody, request: ScopedRequest) -> bool:
        with request.deadline.open_scope():
            await self._sender.send_all(body, body.forward)
            return True
        await request.stack.aclose()  # the work ends now, also if its client cannot be told
        with trio.move_on_after(GRACE):
            await self._sender.send_last(body.last_frames(self.app.expire(request.deadline)))
            return True
        return False


async def _send_part(send: ASGISendCallable, part: str | bytes) -> None:
    body = part.encode() if isinstance(part, str) else part
    await send({"type": "http.response.body", "body": body, "more_body": True})


class _Route(QuartRule):
    """A route that is found by its path, and not asked for one: werkzeug would compile a function that makes
    paths for each route, which is nearly all that making an application takes.

    Relies on werkzeug's private `_compile_builder`.
    """

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        return _make_no_path


def _make_no_path(*_: object) -> tuple[str, str]:
    raise NotImplementedError("no path is made of a route")


class App(QuartTrio):
    """quart-trio, with a scope and a deadline per request, and no other time limit on responses.

    It runs under any ASGI server on trio. `trioserve.server.http.serve_http` adds what stock hypercorn
    lacks: see there.
    """

    asgi_http_class = _ScopedConnection
    asgi_websocket_class = WebsocketConnection
    request_class = ScopedRequest
    websocket_class = ScopedWebsocket
    url_rule_class = _Route  # type: ignore[assignment]  # as in quart
    default_config = ImmutableDict({**QuartTrio.default_config, "RESPONSE_TIMEOUT": None})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # A doubled slash is another path, and no redirect, whose target would be up to the Host header.
        self.url_map.merge_slashes = False
        self.time_limits = TimeLimits()
        self.count_expired: Callable[[], None] = lambda: None
        """Called for each request that ran out of time, unless its deadline has one of its own."""
        self.count_refusal: Callable[[str], None] = lambda _: None
        """Called, with the reason, for what is turned away before it is known which model it is for."""
        self.count_websockets: Callable[[int], None] = lambda change: None
        """Called with 1 when a WebSocket's handler begins, and with -1 when it has ended."""
        self.body_limits: dict[str, int] = {}
        """Bytes that the body of a request to a path may have, where that is not MAX_CONTENT_LENGTH."""
        self._ends_at = math.inf
        self._deadlines: set[RequestDeadline] = set()  # of the requests that are open

    @property
    def max_body_size(self) -> int:
        """Bytes that any body may have."""
        return max([int(self.config["MAX_CONTENT_LENGTH"]), *self.body_limits.values()])

    @contextmanager
    def open_request(self, deadline: RequestDeadline) -> Iterator[None]:
        """Let `end_requests` know of a request while it is open."""
        deadline.end_by(self._ends_at, shutting_down)
        self._deadlines.add(deadline)
        try:
            yield
        finally:
            self._deadlines.discard(deadline)

    @contextmanager
    def open_websocket(self, deadline: RequestDeadline) -> Iterator[None]:
        """As `open_request`, of a WebSocket."""
        self.count_websockets(1)
        try:
            with self.open_request(deadline):
                yield
        finally:
            self.count_websockets(-1)

    def end_requests(self, at: float) -> None:
        """End every request and WebSocket, present and future, that still works at this time of trio's clock:
        its client is told that the server shuts down. Not a checkpoint. What is then left is cancelled by the
        server."""
        self._ends_at = min(self._ends_at, at)
        for deadline in self._deadlines:
            deadline.end_by(self._ends_at, shutting_down)

    def expire(self, deadline: RequestDeadline) -> TrioserveError:
        """A request has run out of time: count it. Returns what its client is told."""
        (deadline.count_expired or self.count_expired)()
        return deadline.error()

    def create_url_adapter(self, request: BaseRequestWebsocket | None) -> MapAdapter | None:
        """Routes go by method and path alone: Host and query may be anything, and are not looked at."""
        if request is None:
            return super().create_url_adapter(None)
        return self.url_map.bind(
            "",
            script_name=request.root_path,
            url_scheme=request.scheme,
            default_method=request.method,
            path_info=request.path,
        )

    async def dispatch_request(self, request_context: RequestContext | None = None) -> ResponseReturnValue:
        """As in quart, until the request's deadline: then an error like any other."""
        deadline = request_deadline()
        if self.time_limits.request_timeout is not None:
            deadline.limit(self.time_limits.request_timeout)
        deadline.limit(read_timeout_header(quart.request.headers.getlist(TIMEOUT_HEADER)))
        with deadline.open_scope():
            return await super().dispatch_request(request_context)
        raise self.expire(deadline)

    async def handle_user_exception(
        self, error: Exception | BaseExceptionGroup[BaseException]
    ) -> HTTPException | ResponseReturnValue:
        """As in quart-trio, but errors that come together with a cancellation are logged, not lost."""
        if isinstance(error, BaseExceptionGroup):
            errors, cancellation = error.split(Exception)
            if cancellation is not None:
                if errors is not None:
                    _logger.error("a request failed while it was cancelled", exc_info=errors)
                raise cancellation
        return await super().handle_user_exception(error)
