"""Who comes first, of those that run and of those that wait."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from sortedcontainers import SortedKeyList

from trioserve.core.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Rank", "Ranked", "WaitingRequests", "ranking"]

Rank = tuple[float, int]
"""Lower comes first. No two requests have the same one, as the second part is `Ranked.arrival`."""


class Ranked(Protocol):
    """What is asked of a request here: `trioserve.core.request.Request`, or one for pooling."""

    @property
    def priority(self) -> int: ...
    @property
    def deadline(self) -> float: ...
    @property
    def arrival(self) -> int: ...
    @property
    def status(self) -> RequestStatus: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...


R = TypeVar("R", bound=Ranked)


def _by_arrival(request: Ranked) -> Rank:
    return 0, request.arrival


def _by_priority(request: Ranked) -> Rank:
    return request.priority, request.arrival


def _by_deadline(request: Ranked) -> Rank:
    return request.deadline, request.arrival


_RANKINGS: dict[str, Callable[[Ranked], Rank]] = {
    "fcfs": _by_arrival,
    "priority": _by_priority,
    "deadline": _by_deadline,
}


def ranking(policy: Literal["fcfs", "priority", "deadline"]) -> Callable[[Ranked], Rank]:
    """The order of a policy. It is all that a policy is: whoever ranks first is served and admitted first,
    and whoever ranks last gives up its blocks first.

    A request's rank never changes. So the first of all requests is never preempted for another one, gets a
    share of every step and ends; then the next one is the first. Under `fcfs` everyone becomes the first at
    some time; under the others, as long as not ever more requests arrive that rank before it.
    """
    return _RANKINGS[policy]


class WaitingRequests(Generic[R]):
    """Those that do not run, sorted by rank; adding and removing take logarithmic time."""

    def __init__(self, rank: Callable[[Ranked], Rank]) -> None:
        self._sorted: SortedKeyList[R, Rank] = SortedKeyList(key=rank)
        self.num_prompt_tokens = 0
        """Of all of them: none is computed yet, or it has to be computed anew."""

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[R]:
        return iter(self._sorted)

    @property
    def num_preempted(self) -> int:
        """Of them, those that ran before. Takes linear time."""
        return sum(map(_was_preempted, self._sorted))

    def first(self, count: int, *, preempted_only: bool) -> list[R]:
        """At most `count` of them; fast, if not `preempted_only`."""
        allowed = filter(_was_preempted, self._sorted) if preempted_only else self._sorted
        return list(islice(allowed, count))

    def add(self, request: R) -> None:
        self._sorted.add(request)
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def remove(self, request: R) -> None:
        self._sorted.remove(request)
        self.num_prompt_tokens -= len(request.prompt_token_ids)


def _was_preempted(request: Ranked) -> bool:
    return request.status is RequestStatus.PREEMPTED
