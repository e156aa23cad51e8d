"""WebSockets of a quart-trio application: each is a scope."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import quart
import trio
from quart.utils import encode_headers
from quart.wrappers import Response
from quart_trio.asgi import TrioASGIWebsocketConnection
from quart_trio.wrappers import TrioWebsocket

from trioserve.server.deadlines import RequestDeadline
from trioserve.server.websocket.stream import DRAINING

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, WebsocketScope
    from quart.typing import ResponseTypes
    from quart.wrappers import Websocket
    from quart_trio import QuartTrio

    from trioserve.server.request_scope import App

__all__ = ["GOING_AWAY", "ScopedWebsocket", "WebsocketConnection", "current_websocket"]

NORMAL, GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR, TRY_AGAIN_LATER = 1000, 1001, 1008, 1011, 1013
"""Codes of a close frame."""

_EXPIRED_GRACE = 1.0
"""Seconds in which the client of a WebSocket that is ended can still be told."""


class ScopedWebsocket(TrioWebsocket):
    """A WebSocket with a stack for what it needs until it is closed.

    `stack` closes in the handler's own task, before the client is told that the WebSocket closes. When the
    client leaves, the scope around handler and stack is cancelled; so what is on the stack cleans up without
    waiting, or shields itself. A WebSocket has no time limit; a shutdown of the server ends it.
    """

    stack: AsyncExitStack

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.deadline = RequestDeadline()
        extension = (self.scope.get("extensions") or {}).get(DRAINING)
        self.draining: trio.Event = trio.Event() if extension is None else extension["event"]
        """Set when the server begins to shut down; under another server, never."""


def current_websocket() -> ScopedWebsocket:
    """The WebSocket that this task handles."""
    return cast("ScopedWebsocket", quart.websocket)


class WebsocketConnection(TrioASGIWebsocketConnection):
    """One WebSocket: quart-trio's watcher, which cancels when the client leaves, beside the handler.

    A handler that returns closes it with 1000, one that fails with a code for its error; before it was
    accepted, both are responses to the handshake. Relies on quart's private `_create_websocket_from_scope`.
    """

    app: App

    def __init__(self, app: QuartTrio, scope: WebsocketScope) -> None:
        super().__init__(app, scope)
        # What waits for the handler waits in the server, where it is bounded in bytes.
        self.send_channel, self.receive_channel = trio.open_memory_channel[bytes | str](0)

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        websocket = cast("ScopedWebsocket", self._create_websocket_from_scope(send))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.handle_messages, nursery, receive)
            await self.handle_websocket(nursery, websocket, send)

    async def handle_messages(  # type: ignore[override]  # as in quart-trio
        self, nursery: trio.Nursery, receive: ASGIReceiveCallable
    ) -> None:
        while (event := await receive())["type"] != "websocket.disconnect":
            if event["type"] == "websocket.receive":
                text, data = event.get("text"), event.get("bytes") or b""
                await self.send_channel.send(data if text is None else text)
        nursery.cancel_scope.cancel()

    async def handle_websocket(  # type: ignore[override]  # as in quart-trio
        self, nursery: trio.Nursery, websocket: Websocket, send: ASGISendCallable
    ) -> None:
        scoped = cast("ScopedWebsocket", websocket)
        with self.app.open_websocket(scoped.deadline):
            with scoped.deadline.open_scope() as scope:
                async with AsyncExitStack() as scoped.stack:
                    response = await self.app.handle_websocket(websocket)
                await self._end(response, send)
            if scope.cancelled_caught:
                with trio.move_on_after(_EXPIRED_GRACE):
                    await self._close(send, GOING_AWAY, str(self.app.expire(scoped.deadline)))
        nursery.cancel_scope.cancel()

    async def _end(self, response: ResponseTypes | None, send: ASGISendCallable) -> None:
        if self._accepted:
            await self._close(send, NORMAL if response is None else _close_code(response.status_code))
        elif response is None:
            await self._close(send, NORMAL)
        else:
            await self._refuse(response, send)

    async def _close(self, send: ASGISendCallable, code: int, reason: str = "") -> None:
        if not self._closed:
            await self.close_connection(send, code, reason)

    async def _refuse(self, response: ResponseTypes, send: ASGISendCallable) -> None:
        if "websocket.http.response" not in (self.scope.get("extensions") or {}):
            await self._close(send, POLICY_VIOLATION)
            return
        headers = encode_headers(response.headers)
        await send(
            {"type": "websocket.http.response.start", "status": response.status_code, "headers": headers}
        )
        body = await _read(response)
        await send({"type": "websocket.http.response.body", "body": body, "more_body": False})


async def _read(response: ResponseTypes) -> bytes:
    if isinstance(response, Response):
        return await response.get_data(as_text=False)
    return response.get_data()  # werkzeug's own, of an error that nobody has handled


def _close_code(status: int) -> int:
    """For an error that HTTP would answer with this status."""
    if status in {429, 503}:
        return TRY_AGAIN_LATER
    return POLICY_VIOLATION if status < 500 else INTERNAL_ERROR
