"""Who comes first, of those that run and of those that wait."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Literal

from sortedcontainers import SortedKeyList

from trioserve.core.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trioserve.core.request import Request

__all__ = ["Rank", "WaitingRequests", "ranking"]

Rank = tuple[float, int]
"""Lower comes first. No two requests have the same one, as the second part is `Request.arrival`."""


def _by_arrival(request: Request) -> Rank:
    return 0, request.arrival


def _by_priority(request: Request) -> Rank:
    return request.priority, request.arrival


def _by_deadline(request: Request) -> Rank:
    return request.deadline, request.arrival


_RANKINGS: dict[str, Callable[[Request], Rank]] = {
    "fcfs": _by_arrival,
    "priority": _by_priority,
    "deadline": _by_deadline,
}


def ranking(policy: Literal["fcfs", "priority", "deadline"]) -> Callable[[Request], Rank]:
    """The order of a policy. It is all that a policy is: whoever ranks first is served and admitted first,
    and whoever ranks last gives up its blocks first.

    A request's rank never changes. So the first of all requests is never preempted for another one, gets a
    share of every step and ends; then the next one is the first. Under `fcfs` everyone becomes the first at
    some time; under the others, as long as not ever more requests arrive that rank before it.
    """
    return _RANKINGS[policy]


class WaitingRequests:
    """Those that do not run, sorted by rank; adding and removing take logarithmic time."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self._sorted: SortedKeyList[Request, Rank] = SortedKeyList(key=rank)
        self.num_prompt_tokens = 0
        """Of all of them: none is computed yet, or it has to be computed anew."""

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._sorted)

    @property
    def num_preempted(self) -> int:
        """Of them, those that ran before. Takes linear time."""
        return sum(map(_was_preempted, self._sorted))

    def first(self, count: int, *, preempted_only: bool) -> list[Request]:
        """At most `count` of them; fast, if not `preempted_only`."""
        allowed = filter(_was_preempted, self._sorted) if preempted_only else self._sorted
        return list(islice(allowed, count))

    def add(self, request: Request) -> None:
        self._sorted.add(request)
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def remove(self, request: Request) -> None:
        self._sorted.remove(request)
        self.num_prompt_tokens -= len(request.prompt_token_ids)


def _was_preempted(request: Request) -> bool:
    return request.status is RequestStatus.PREEMPTED
