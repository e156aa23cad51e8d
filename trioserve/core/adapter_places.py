"""How many different adapters a step may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.config import SchedulerConfig
    from trioserve.core.request import Request

__all__ = ["AdapterPlaces"]

_MAX_PASSED = 256
"""Requests that are looked at in vain per step; each takes some 100 ns."""


class AdapterPlaces:
    """The places for adapters, while a step's requests are admitted.

    The adapters of those that run have a place each. Who waits for a place is passed by others: by those
    without an adapter always, and by those whose adapter has a place `max_num_seqs` times, as many as might
    run together. Then they, too, have to wait, until requests have ended and a place is free: without that,
    an adapter that is always in use would keep it for ever.
    """

    def __init__(self, running: Sequence[Request], config: SchedulerConfig) -> None:
        self._num_places = config.max_loras
        self._patience = config.max_num_seqs
        self._used = set() if config.max_loras is None else self.used_by(running)
        self._first_passed: Request | None = None
        self.max_passed = 0 if config.max_loras is None else _MAX_PASSED
        """Requests that `has_one_for` may refuse."""

    @staticmethod
    def used_by(requests: Iterable[Request]) -> set[str]:
        return {request.lora for request in requests if request.lora is not None}

    def has_one_for(self, request: Request) -> bool:
        """Asked in the order of the requests' ranks."""
        if request.lora is None:
            return True
        first = self._first_passed
        if first is not None and first.num_overtaken >= self._patience:
            return False
        if request.lora in self._used or len(self._used) < (self._num_places or 0):
            return True
        self._first_passed = first or request
        return False

    def take(self, request: Request) -> None:
        """It runs."""
        if request.lora is None:
            return
        self._used.add(request.lora)
        if self._first_passed is not None:
            self._first_passed.num_overtaken += 1
