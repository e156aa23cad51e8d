"""How many requests for generation are let in, in all and of each client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import OverloadedError, TrioserveError
from trioserve.server.errors import rate_limited
from trioserve.server.rate_window import RateWindow

if TYPE_CHECKING:
    from trioserve.server_args import ServerArgs

__all__ = ["Refusal", "RequestLimits"]


@attrs.frozen
class Refusal:
    """Why a request is not let in."""

    reason: str
    """For metrics."""
    error: TrioserveError
    """For the client."""


@attrs.define(eq=False)
class RequestLimits:
    """The limits of `args` and what is under way. Nothing here waits.

    Between `find_refusal` and `enter` there must be no checkpoint.
    """

    _max_running: int | None
    _max_running_of_client: int | None
    _rate_limit: int | None
    _running: int = attrs.field(init=False, default=0)
    # Invariant: no value is 0, and their sum is `_running`.
    _running_of: dict[str, int] = attrs.field(init=False, factory=dict)
    _window: RateWindow | None = attrs.field(init=False, default=None)

    @classmethod
    def of(cls, args: ServerArgs) -> RequestLimits:
        return cls(
            args.max_concurrent_requests,
            args.max_concurrent_requests_per_key,
            args.max_requests_per_minute_per_key,
        )

    def __attrs_post_init__(self) -> None:
        if self._rate_limit is not None:
            self._window = RateWindow(self._rate_limit)

    def find_refusal(self, client: str) -> Refusal | None:
        """What keeps a request of `client` out now; the client's own limits first."""
        running, limit = self._running_of.get(client, 0), self._max_running_of_client
        if limit is not None and running >= limit:
            message = f"You have {running} requests under way; {limit} are allowed at a time."
            # Nobody knows when one of them ends.
            return Refusal("client_concurrency", rate_limited(message, retry_after=1))
        if self._window is not None and (wait := self._window.wait(client, trio.current_time())):
            limit = self._rate_limit
            message = f"You have begun {limit} requests in the last minute; {limit} are allowed."
            return Refusal("client_rate", rate_limited(message, retry_after=wait))
        if self._max_running is not None and self._running >= self._max_running:
            limit = self._max_running
            message = f"The server has {self._running} requests under way; it takes {limit} at a time."
            return Refusal("server_concurrency", OverloadedError(message))
        return None

    def enter(self, client: str) -> None:
        """Let a request in; `leave` must follow."""
        if self._window is not None:
            self._window.count(client, trio.current_time())
        self._running += 1
        self._running_of[client] = self._running_of.get(client, 0) + 1

    def leave(self, client: str) -> None:
        """A request that was let in has ended."""
        self._running -= 1
        self._running_of[client] -= 1
        if not self._running_of[client]:
            del self._running_of[client]

    @property
    def num_running(self) -> int:
        return self._running

    @property
    def num_clients(self) -> int:
        """Of which anything is remembered."""
        return max(len(self._running_of), 0 if self._window is None else self._window.num_clients)
