"""Which pages' scripts may call the API: https://fetch.spec.whatwg.org/#http-cors-protocol"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from quart import Quart, Response, request, websocket

from trioserve.server.errors import origin_not_allowed
from trioserve.server.replies import empty_reply
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from quart.typing import ResponseTypes

__all__ = ["allow_origins"]

_EXPOSED = "X-Request-Id, Retry-After"
_MAX_AGE = "600"
"""Seconds in which a browser need not ask again."""


def allow_origins(app: Quart, args: ServerArgs) -> None:
    """Answer preflights, and mark responses, errors too, as readable for pages of `args.allowed_origins`.

    Must come before what demands a key: browsers send none with a preflight. Without origins nothing is added
    to responses: browsers then let no page of another origin read anything. WebSockets of such pages are
    refused.
    """
    rules = _Rules(args)
    app.before_websocket(rules.check_origin)
    if not args.allowed_origins:
        return
    app.before_request(rules.answer_preflight)
    app.after_request(rules.mark)


@attrs.frozen
class _Rules:
    _args: ServerArgs

    async def check_origin(self) -> None:
        """A browser lets any page open a WebSocket, and leaves it to the server to look who that is. Who is
        no browser says nothing.

        Raises:
          ApiError: it is a page of another origin, which is not allowed (403).
        """
        origin = websocket.headers.get("Origin")
        if origin is None or {"*", origin} & {*self._args.allowed_origins}:
            return
        if origin.partition("://")[2] != websocket.headers.get("Host"):
            raise origin_not_allowed(origin)

    async def answer_preflight(self) -> Response | None:
        """200 for every path, whether it exists or not; what is granted is in the headers (see `mark`)."""
        return empty_reply(200) if _is_preflight() else None

    async def mark(self, response: ResponseTypes) -> ResponseTypes:
        origin = request.headers.get("Origin", "")
        if "*" in self._args.allowed_origins:
            granted = "*"
        else:
            response.vary.add("Origin")
            granted = origin if origin in self._args.allowed_origins else ""
        if origin and granted:
            self._grant(response, granted)
        return response

    def _grant(self, response: ResponseTypes, origin: str) -> None:
        headers = response.headers
        headers["Access-Control-Allow-Origin"] = origin
        headers["Access-Control-Expose-Headers"] = _EXPOSED
        if self._args.allow_credentials:
            headers["Access-Control-Allow-Credentials"] = "true"
        if _is_preflight():
            headers["Access-Control-Max-Age"] = _MAX_AGE
            headers["Access-Control-Allow-Methods"] = _listed(self._args.allowed_methods, "Method")
            headers["Access-Control-Allow-Headers"] = _listed(self._args.allowed_headers, "Headers")


def _listed(allowed: tuple[str, ...], asked: str) -> str:
    """With `*`, what was asked for: browsers do not take `*` itself for Authorization, or with cookies.

    No response to OPTIONS is cached but by the browser that asked, so it need not say that it varies.
    """
    return (
        request.headers.get(f"Access-Control-Request-{asked}", "") if "*" in allowed else ", ".join(allowed)
    )


def _is_preflight() -> bool:
    return (
        request.method == "OPTIONS"
        and "Origin" in request.headers
        and "Access-Control-Request-Method" in request.headers
    )
