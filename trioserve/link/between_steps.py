"""Moments at which no step is in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

from trioserve.link.step_thread import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioserve.link.service import SteeredCore

__all__ = ["BetweenSteps"]

T = TypeVar("T")


class BetweenSteps:
    """Where tasks wait for the step loop, which calls `arrive` after each step and before the next.

    A task that was woken up at such a moment would come too late: the loop would have launched the next step.
    So what has to happen between two steps is a function, and the loop calls it.
    """

    def __init__(self, core: SteeredCore) -> None:
        self._core = core
        self._jobs: list[Job[object]] = []  # one per task that waits in `do`
        self._arrivals = trio.lowlevel.ParkingLot()

    def arrive(self) -> None:
        """No step is in flight now. Not a checkpoint."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.run()
            job.finished()
        self.notify()

    def notify(self) -> None:
        """Something has changed that `wait_until` may wait for. Not a checkpoint."""
        self._arrivals.unpark_all()

    async def do(self, call: Callable[[], T]) -> T:
        """Call a function when no step is in flight, which may be now; returns or raises what it does."""
        if not self._core.step_in_flight:
            return call()
        job = Job(call)
        self._jobs.append(job)  # type: ignore[arg-type]  # its result is of no interest to the list
        try:
            return await job.wait()
        finally:
            if job in self._jobs:
                self._jobs.remove(job)  # type: ignore[arg-type]  # as above

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Looks again after every step and every `notify`."""
        while not is_true():
            await self._arrivals.park()
