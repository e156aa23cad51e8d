"""What the scheduler's requests have to report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from trioserve.core.policy import Ranked
from trioserve.core.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["News"]

R = TypeVar("R", bound=Ranked)


class News(Generic[R]):
    """New tokens and ends, and aborted requests whose blocks are free: kept until they are taken.

    Every id that is aborted is reported as free once: at once, or when the step in flight is back that the
    request was part of.
    """

    def __init__(self) -> None:
        self._requests: dict[R, None] = {}  # who has something to report, as an ordered set
        # Bounded by the aborts since the news were last taken. Invariant: without a step in flight, _held is
        # empty.
        self._freed: list[int] = []
        self._held: list[int] = []

    def add(self, request: R) -> None:
        """It has new tokens, or has ended."""
        self._requests[request] = None

    def take(self) -> list[R]:
        """Those that have something to report since the last call, without those aborted."""
        requests, self._requests = self._requests, {}
        return [request for request in requests if request.status is not RequestStatus.ABORTED]

    def add_aborted(self, request_id: int, *, is_held: bool) -> None:
        """`is_held`: its blocks are not free before the step in flight is back."""
        (self._held if is_held else self._freed).append(request_id)

    def free_held(self) -> None:
        """The step in flight is back."""
        if self._held:
            self._freed += self._held
            self._held = []

    @property
    def has_freed(self) -> bool:
        return bool(self._freed)

    def take_freed(self) -> Sequence[int]:
        """The ids of aborted requests that hold nothing any more, or never did, since the last call."""
        freed, self._freed = self._freed, []
        return freed
