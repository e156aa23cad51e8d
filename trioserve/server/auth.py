"""Who sends a request, and whether it may: keys."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, cast

from quart import Quart, Websocket, g

from trioserve.server.current_request import current_request
from trioserve.server.errors import unauthorized

if TYPE_CHECKING:
    from collections.abc import Collection

    from trioserve.server.api_keys import ApiKeys

__all__ = ["client_of_request", "require_keys"]


_KEY = "openai-insecure-api-key."
"""What follows it, in the name of a subprotocol, is a key: scripts of pages can set no headers."""


def client_of_request() -> str:
    """Who sent the request at hand, for limits and for what belongs to somebody; opaque.

    It is the digest of the API key, or, where none is known, the address of the connection: of IPv6 the first
    64 bits, as a network hands out no less. Headers such as X-Forwarded-For, which anybody can send, are not
    looked at: behind a proxy, give each client a key.
    """
    return cast("str", g.client)


def require_keys(app: Quart, keys: ApiKeys, open_paths: Collection[str]) -> None:
    """Every request of `app`, whether its path exists or not, must bring one of `keys`, but for exactly
    `open_paths`. Without keys everybody may. Either way `client_of_request` is known from then on."""

    async def check() -> None:
        key = _given_key() if keys else None
        digest = None if key is None else keys.find(key)
        g.client = f"address:{_network()}" if digest is None else f"key:{digest}"
        if keys and digest is None and current_request().path not in open_paths:
            raise unauthorized(given=key is not None)

    app.before_request(check)
    app.before_websocket(check)


def _given_key() -> bytes | None:
    """A bearer token, or else what clients of Anthropic's API send, or else what browsers can send with a
    WebSocket."""
    request = current_request()
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" else request.headers.get("X-Api-Key")
    if key is None and isinstance(request, Websocket):
        offered = request.requested_subprotocols
        key = next((name.removeprefix(_KEY) for name in offered if name.startswith(_KEY)), None)
    # ASGI servers show a header's bytes as Latin-1.
    return None if key is None else key.strip(" \t").encode("latin-1")


def _network() -> str:
    host, *_ = current_request().scope.get("client") or ("unix",)
    try:
        address = ipaddress.IPv6Address(str(host).partition("%")[0])
    except ValueError:  # IPv4, or whatever else an ASGI server tells
        return str(host)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))
