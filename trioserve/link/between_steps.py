"""Moments at which no step is in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
import outcome
import trio

if TYPE_CHECKING:
    from trioserve.core.engine import EngineCore

__all__ = ["BetweenSteps"]

T = TypeVar("T")


@attrs.define(eq=False)
class _Deed(Generic[T]):
    call: Callable[[], T]
    done: trio.Event = attrs.Factory(trio.Event)
    result: outcome.Outcome[T] | None = None

    def run(self) -> None:
        self.result = outcome.capture(self.call)
        self.done.set()


class BetweenSteps:
    """Where tasks wait for the step loop, which calls `arrive` after each step and before the next.

    A task that was woken up at such a moment would come too late: the loop would have launched the next step.
    So what has to happen between two steps is a function, and the loop calls it.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._deeds: list[_Deed[object]] = []  # one per task that waits in `do`
        self._arrivals = trio.lowlevel.ParkingLot()

    def arrive(self) -> None:
        """No step is in flight now. Not a checkpoint."""
        deeds, self._deeds = self._deeds, []
        for deed in deeds:
            deed.run()
        self.notify()

    def notify(self) -> None:
        """Something has changed that `wait_until` may wait for. Not a checkpoint."""
        self._arrivals.unpark_all()

    async def do(self, call: Callable[[], T]) -> T:
        """Call a function when no step is in flight, which may be now; returns or raises what it does."""
        if not self._core.step_in_flight:
            return call()
        deed = _Deed(call)
        self._deeds.append(deed)  # type: ignore[arg-type]  # its result is of no interest to the list
        try:
            await deed.done.wait()
        finally:
            if deed.result is None:
                self._deeds.remove(deed)  # type: ignore[arg-type]
        assert deed.result is not None
        return deed.result.unwrap()

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Looks again after every step and every `notify`."""
        while not is_true():
            await self._arrivals.park()
