"""The one thread in which an engine core computes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs
import outcome
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Job", "StepThread"]

T = TypeVar("T")


@attrs.define(eq=False)
class Job(Generic[T]):
    """A call that runs, or will run, in the thread."""

    _call: Callable[[], T]
    _done: trio.Event = attrs.Factory(trio.Event)
    _result: outcome.Outcome[T] | None = None

    def run(self) -> None:
        """In the thread; `finished` is to be called afterwards, in trio's."""
        self._result = outcome.capture(self._call)

    def finished(self) -> None:
        self._done.set()

    async def wait(self) -> T:
        """Its result, or what it raised. Cancelling stops the waiting, not the call; the thread's owner waits
        for its end."""
        await self._done.wait()
        assert self._result is not None
        return self._result.unwrap()


class StepThread:
    """A worker thread that stays the same for its owner's whole life.

    `trio.to_thread.run_sync` alone may run each call in another thread, and what torch keeps per thread
    (its thread count, its OpenMP team) would be set up again; a job here also costs less (about 30 us
    against 45).
    """

    def __init__(self) -> None:
        # Bound: the step loop has one job at a time, and a control that runs between steps one.
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()

    def start(self, function: Callable[..., T], *args: object) -> Job[T]:
        """Let the thread call `function(*args)`, after what it was given before. Not a checkpoint."""
        job = Job(lambda: function(*args))
        self._jobs.put(job)  # type: ignore[arg-type]  # what a job gives is of no interest to the thread
        return job

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Start a call and wait for its result, as `Job.wait` does."""
        return await self.start(function, *args).wait()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            self._token.run_sync_soon(job.finished)

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
