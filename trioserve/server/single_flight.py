"""One run of an operation for all who ask while it lasts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import attrs
import trio

__all__ = ["SingleFlight"]

T = TypeVar("T")


@attrs.define(eq=False)
class _Flight(Generic[T]):
    """One run of the operation."""

    landed: trio.Event = attrs.field(factory=trio.Event)
    result: tuple[T] | None = None
    """None while it runs, and if it was given up."""


@attrs.define(eq=False)
class SingleFlight(Generic[T]):
    """Runs an operation at most once at a time; who asks meanwhile waits for the same result.

    No task is started: the first who asks runs the operation itself. If it is cancelled, or the operation
    raises (which only this one is told), one of those who wait begins again.
    """

    _operation: Callable[[], Awaitable[T]]
    # Invariant: not None exactly while one task is inside `_fly`.
    _flight: _Flight[T] | None = attrs.field(init=False, default=None)

    async def run(self) -> T:
        """The result of a run that ends after this call. A checkpoint as far as the operation is one."""
        while (flight := self._flight) is not None:
            await flight.landed.wait()
            if flight.result is not None:
                return flight.result[0]
        return await self._fly()

    async def _fly(self) -> T:
        flight = self._flight = _Flight[T]()
        try:
            result = await self._operation()
            flight.result = (result,)
            return result
        finally:
            self._flight = None
            flight.landed.set()
