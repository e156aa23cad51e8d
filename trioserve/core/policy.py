"""Who waits before whom, and who gives way when blocks run out."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.core.request import Request

__all__ = ["FirstComeFirstServed", "SchedulingPolicy"]


class SchedulingPolicy(Protocol):
    """The waiting requests, in the order in which they are to be admitted."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """First to last."""

    def add(self, request: Request) -> None:
        """A request has arrived."""

    def put_back(self, request: Request) -> None:
        """A request was preempted."""

    def first(self) -> Request:
        """Who is to be admitted next; there must be one."""

    def remove(self, request: Request) -> None:
        """It was admitted, or nobody wants it any more."""

    def victim(self, running: Sequence[Request]) -> Request:
        """Which running request gives its blocks to the others.

        The scheduler serves `running` in its order, and asks when the blocks do not suffice for one of them:
        the victim must be that one or stand behind it. `running` has at least two entries.
        """


class FirstComeFirstServed:
    """By arrival. The last to be admitted gives way, and is the first to come back.

    So everyone who runs arrived before everyone who waits, and the two together are sorted by arrival. The
    oldest request never gives way to anyone, is served first in every step and ends after finitely many;
    then the next one is the oldest. Nobody starves.
    """

    def __init__(self) -> None:
        # Ordered by arrival. A dict, so that an abort need not search.
        self._waiting: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def add(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def first(self) -> Request:
        return next(iter(self._waiting.values()))

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]
