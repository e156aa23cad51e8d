"""The one thread in which an engine core computes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import attrs
import outcome
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["StepThread"]

T = TypeVar("T")


@attrs.define(eq=False)
class _Job:
    call: Callable[[], object]
    done: trio.Event = attrs.Factory(trio.Event)
    result: outcome.Outcome[object] | None = None


class StepThread:
    """A worker thread that stays the same for its owner's whole life.

    `trio.to_thread.run_sync` alone may run each call in another thread, and what torch keeps per thread
    (its thread count, its OpenMP team) would be set up again; a job here also costs less (about 30 us
    against 45).
    """

    def __init__(self) -> None:
        # Bound: one job per task that waits in `run`; the step loop is the only one.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call `function(*args)` in the thread and wait for its result.

        Cancelling stops the waiting, not the call; the thread's owner waits for its end.
        """
        job = _Job(lambda: function(*args))
        self._jobs.put(job)
        await job.done.wait()
        assert job.result is not None
        return job.result.unwrap()  # type: ignore[return-value]  # the call's own result

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.result = outcome.capture(job.call)
            self._token.run_sync_soon(job.done.set)

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[StepThread]:
        """Leaving the scope waits for the job that runs, if one does, and ends the thread."""
        thread = cls()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thread._own_thread)
            try:
                yield thread
            finally:
                thread._jobs.put(None)

    async def _own_thread(self) -> None:
        # Shielded: the thread ends by the None in its queue, not by being abandoned.
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._serve, limiter=trio.CapacityLimiter(1))
