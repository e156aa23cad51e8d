"""How often a client may do something: a sliding window of one minute."""

from __future__ import annotations

from array import array
from collections import OrderedDict

import attrs

__all__ = ["RateWindow"]

_WINDOW = 60.0


@attrs.define(eq=False)
class RateWindow:
    """At most `limit` times in any 60 seconds, each client.

    The times themselves are kept, so the limit is exact and so is the wait that is told; a token bucket
    would let up to twice as many through in a minute. Refused attempts do not count.

    Its size is bounded by what it lets through: at most `limit` times for each client that was let through in
    the last minute, and older clients go with the next one that comes.
    """

    _limit: int
    # Invariants: no array is empty or has more than `_limit` items; the clients are in the order of their
    # last time. A plain dict would do, but finds its first key in linear time once others before it are gone.
    _times: OrderedDict[str, array[float]] = attrs.field(init=False, factory=OrderedDict)

    def wait(self, client: str, now: float) -> float:
        """Seconds until `client` may next; 0 if it may now."""
        times = self._times.get(client)
        if times is None or len(times) < self._limit:
            return 0.0
        return max(0.0, times[0] + _WINDOW - now)

    def count(self, client: str, now: float) -> None:
        """`client` does it now."""
        times = self._times.setdefault(client, array("d"))
        if len(times) == self._limit:
            del times[0]
        times.append(now)
        self._times.move_to_end(client)
        self._forget_idle(now)

    @property
    def num_clients(self) -> int:
        return len(self._times)

    def _forget_idle(self, now: float) -> None:
        while self._times[client := next(iter(self._times))][-1] + _WINDOW <= now:
            del self._times[client]
