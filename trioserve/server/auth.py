"""Bearer keys."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from quart import Quart, request

from trioserve.server.errors import unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["OPEN_PATHS", "ApiKeys", "require_keys"]

OPEN_PATHS = frozenset({"/health", "/ping"})
"""What load balancers ask without a key. All else needs one: /metrics and /version as well."""


class ApiKeys:
    """The keys that are accepted; only their hashes are held."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: bytes) -> bool:
        """Takes the same time whichever key matches, and if none does."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def require_keys(app: Quart, keys: ApiKeys) -> None:
    """Every request of `app` must bring one of `keys`, but for `OPEN_PATHS`; without keys nothing changes."""
    if not keys:
        return

    async def check() -> None:
        if request.path in OPEN_PATHS:
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise unauthorized(given=False)
        # ASGI servers show a header's bytes as Latin-1.
        if not keys.accepts(key.strip(" \t").encode("latin-1")):
            raise unauthorized(given=True)

    app.before_request(check)
