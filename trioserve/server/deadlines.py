"""When an HTTP request must have ended, and how that is enforced.

A request's time limit is the least of the server's, of the header X-Request-Timeout and of the body's field
`timeout`. It counts from the moment when the request's headers have been read. A shutdown ends requests in
the same way, with an error of its own.

A deadline has to do three things: end the work at once, whatever the request waits for; let the client know;
and be seen by `trio.current_effective_deadline()`, from which the engine learns it. Weighed were:

- One scope around handler and body. It ends everything, but a reply made outside of it has lost the handler's
  context (request id, hooks).
- A scope around each wait for a token, so that the writer, outside of it, can still say what happened. That
  costs 4 to 8 us per token where a token costs 40, and leaves the work going on while a write is blocked.
- A soft scope around the waits and a hard one around the writes, beside a task that ends the work when the
  soft one expires: one more task per request, and two ways in which a request's work ends.
- One scope around the handler and another around the body, which is what we do (`request_scope.py`). Nothing
  is spent per token. In the handler, an expiry is an error like any other, and becomes a 504. In the body, it
  cancels what the stream waits for, also a blocked write (which drops the connection, as a part of a message
  is on the wire); then the request's stack closes, which ends the engine's work; and only then the error
  event is written, in a grace of its own.

The price: nothing that is opened in the handler for the body may hold a scope or a nursery. So what stays on
the request's stack is released synchronously, and several streams are merged without tasks (`generation.py`).
A request's deadline ends with its last token: an answer that is whole is written, however long that takes.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import InvalidRequestError, TrioserveError
from trioserve.server.errors import deadline_exceeded
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trioserve.server_args import ServerArgs

__all__ = ["TIMEOUT_HEADER", "RequestDeadline", "TimeLimits", "read_timeout_header"]

TIMEOUT_HEADER = "X-Request-Timeout"

_DECIMAL = re.compile(r"(?=.{1,32}$)([0-9]+(\.[0-9]*)?|\.[0-9]+)")


@attrs.frozen(kw_only=True)
class TimeLimits:
    """What a server says about the time of requests. In seconds."""

    request_timeout: float | None = None
    keep_alive_interval: float = math.inf
    """A stream that is silent for so long gets a comment, and its headers first."""

    @classmethod
    def of(cls, args: ServerArgs) -> TimeLimits:
        return cls(
            request_timeout=args.request_timeout,
            keep_alive_interval=args.sse_keep_alive_interval or math.inf,
        )


def read_timeout_header(values: Iterable[str]) -> float:
    """The least of the headers of this name, in seconds; infinity if there is none.

    Raises:
      InvalidRequestError: one is no positive decimal.
    """
    return min(map(_read_seconds, values), default=math.inf)


def _read_seconds(value: str) -> float:
    seconds = float(value) if _DECIMAL.fullmatch(value) else 0.0
    if seconds > 0:
        return seconds
    raise InvalidRequestError(
        f"{TIMEOUT_HEADER} must be a positive decimal number of seconds, got {shown(value)}.",
        parameter=TIMEOUT_HEADER,
    )


class RequestDeadline:
    """When one request must have ended, and what its client is told otherwise. The earliest limit counts."""

    def __init__(self) -> None:
        self._started = trio.current_time()
        self._at = math.inf
        self._error: Callable[[], TrioserveError] = deadline_exceeded
        self._scope = trio.CancelScope()
        self._lifted = False
        self.count_expired: Callable[[], None] | None = None
        """Called if it passes, in place of the application's: by the model that the request is for."""

    def limit(self, seconds: float) -> None:
        """Allow so many seconds, from the request's headers on."""
        self.end_by(self._started + seconds, deadline_exceeded)

    def end_by(self, at: float, error: Callable[[], TrioserveError]) -> None:
        """Allow it to run until this time of trio's clock; if it runs still, that is an `error`."""
        if at < self._at and not self._lifted:
            self._at, self._error = at, error
            self._scope.deadline = at

    def fork(self) -> RequestDeadline:
        """Another one, with the limits that are known by now: for work that outlives its request."""
        forked = RequestDeadline()
        forked._started = self._started
        forked.count_expired = self.count_expired
        forked.end_by(self._at, self._error)
        return forked

    def open_scope(self) -> trio.CancelScope:
        """A scope that is cancelled at the deadline, also when that moves. One is open at a time."""
        self._scope = trio.CancelScope(deadline=self._at)
        return self._scope

    async def lift(self) -> None:
        """The work is done, and writing it takes the time it takes.

        Raises Cancelled, by the scope that is open, if the deadline has passed: so an answer has one end, and
        never both its own and the deadline's. Otherwise it is no checkpoint.
        """
        if self._scope.cancel_called:
            await trio.lowlevel.checkpoint()
        self._lifted = True
        self._at = self._scope.deadline = math.inf

    def error(self) -> TrioserveError:
        """What the client is told when the deadline has passed."""
        return self._error()
