"""Responses in memory, until the server ends."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.server.responses.store import (
    HistoryTooLongError,
    StoredResponse,
    StoreLimits,
    UnknownResponseError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryStore"]


@attrs.define(eq=False)
class MemoryStore:
    """A `ResponseStore`. Age is looked at with every use: what is too old is gone, though its memory may be
    given back later."""

    _limits: StoreLimits
    _now: Callable[[], float] = time.time
    """In seconds."""
    # In the order of their last use, each with its time; `_size` is the sum of their sizes.
    _kept: OrderedDict[str, tuple[StoredResponse, float]] = attrs.field(init=False, factory=OrderedDict)
    _size: int = attrs.field(init=False, default=0)

    async def put(self, stored: StoredResponse) -> None:
        await trio.lowlevel.checkpoint()
        self._drop(stored.id)
        if stored.size > self._limits.max_bytes:
            return
        self._kept[stored.id] = stored, self._now()
        self._size += stored.size
        self._purge()

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        await trio.lowlevel.checkpoint()
        return self._use(owner, response_id)

    async def history(self, owner: str, response_id: str, max_bytes: int) -> Sequence[StoredResponse]:
        await trio.lowlevel.checkpoint()
        found: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            stored = self._use(owner, next_id)
            if stored is None:
                raise UnknownResponseError(next_id)
            found.append(stored)
            max_bytes -= stored.size_said
            if max_bytes < 0:
                raise HistoryTooLongError
            next_id = stored.previous_id
        return found[::-1]

    async def delete(self, owner: str, response_id: str) -> bool:
        await trio.lowlevel.checkpoint()
        if self._use(owner, response_id) is None:
            return False
        self._drop(response_id)
        return True

    @property
    def num_responses(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._size

    def _use(self, owner: str, response_id: str) -> StoredResponse | None:
        self._purge()
        stored, _ = self._kept.get(response_id, (None, 0.0))
        if stored is None or stored.owner != owner:
            return None
        self._kept[response_id] = stored, self._now()
        self._kept.move_to_end(response_id)
        return stored

    def _purge(self) -> None:
        too_old = self._now() - self._limits.ttl
        while self._kept:
            first, (_, used) = next(iter(self._kept.items()))
            too_many = len(self._kept) > self._limits.max_responses or self._size > self._limits.max_bytes
            if not too_many and used > too_old:
                return
            self._drop(first)

    def _drop(self, response_id: str) -> None:
        stored, _ = self._kept.pop(response_id, (None, 0.0))
        if stored is not None:
            self._size -= stored.size
