"""A quart-trio application whose requests are scopes: resources last from the handler to the last byte."""

from __future__ import annotations

import logging
import math
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, cast

import quart
import trio
from quart.utils import encode_headers
from quart.wrappers import Response
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.datastructures import ImmutableDict

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
    from quart.typing import ResponseReturnValue, ResponseTypes
    from quart.wrappers import Request
    from werkzeug.exceptions import HTTPException

__all__ = ["App", "ScopedRequest", "request_stack"]

_logger = logging.getLogger("trioserve.http")


class ScopedRequest(TrioRequest):
    """A request with a stack for what it needs until its response is sent.

    `stack` closes in the request's own task, after the body and before the end of the response: a client
    that has seen the end of a chunked response knows that what served it is free. When the client leaves,
    the scope around handler, body and stack is cancelled; so what is on the stack cleans up without waiting,
    or shields itself.
    """

    stack: AsyncExitStack


def request_stack() -> AsyncExitStack:
    """The stack of the request that this task handles."""
    return cast("ScopedRequest", quart.request).stack


class _ScopedConnection(TrioASGIHTTPConnection):
    """One request: quart-trio's watcher, which cancels when the client leaves, beside the handler.

    Relies on quart's private `_create_request_from_scope`.
    """

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        request = self._create_request_from_scope(send)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.handle_messages, nursery, request, receive)
            await self.handle_request(nursery, request, send)

    async def handle_request(  # type: ignore[override]  # as in quart-trio
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        async with AsyncExitStack() as stack:
            cast("ScopedRequest", request).stack = stack
            response = await self.app.handle_request(request)
            with trio.move_on_after(self._timeout(response)) as limit:
                await self._send_head_and_body(send, response)
        # A server answers the last message with a disconnect, so the stack had to close before it.
        if not limit.cancelled_caught:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        nursery.cancel_scope.cancel()

    def _timeout(self, response: ResponseTypes) -> float:
        timeout = self.app.config["RESPONSE_TIMEOUT"]
        if isinstance(response, Response) and response.timeout is not Ellipsis:
            timeout = response.timeout
        return math.inf if timeout is None else timeout

    async def _send_head_and_body(self, send: ASGISendCallable, response: ResponseTypes) -> None:
        headers = encode_headers(response.headers)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        if not isinstance(response, Response):
            for part in response.response:
                await self._send_part(send, part)
            return
        async with response.response as body:
            async for part in body:
                await self._send_part(send, part)

    @staticmethod
    async def _send_part(send: ASGISendCallable, part: str | bytes) -> None:
        body = part.encode() if isinstance(part, str) else part
        await send({"type": "http.response.body", "body": body, "more_body": True})


class App(QuartTrio):
    """quart-trio, with a scope per request (`request_stack`) and no time limit on responses.

    It runs under any ASGI server on trio. `trioserve.server.http.serve_http` adds what stock hypercorn
    lacks: see there.
    """

    asgi_http_class = _ScopedConnection
    request_class = ScopedRequest
    default_config = ImmutableDict({**QuartTrio.default_config, "RESPONSE_TIMEOUT": None})

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
