"""Memory for the KV cache, taken while nobody waits for anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trioserve.link.step_thread import StepThread
    from trioserve.worker.model_runner import ModelRunner

__all__ = ["CachePopulation"]

_IDLE_SECONDS = 0.5
"""Of rest, before it begins."""
_MAX_BYTES = 2**30
_PORTION_BYTES = 2 * 2**20
"""At a time: a request that comes meanwhile waits for this, some milliseconds."""


class CachePopulation:
    """Half of a cache, and 1 GiB at most, is given its memory before a step wants it.

    Where the system has to bring that first, as on a virtual machine that had given it back, steps that are
    the first to touch a block take a quarter longer.
    """

    def __init__(self, thread: StepThread, runner: ModelRunner, num_blocks: int) -> None:
        self._thread = thread
        self._runner = runner
        self._next_block = 0
        self._end_block = min(num_blocks // 2, _MAX_BYTES // runner.bytes_per_block)
        self._portion = max(1, _PORTION_BYTES // runner.bytes_per_block)

    async def go_on_until(self, wanted: trio.Event) -> None:
        """Return once `wanted` is set; meanwhile, after some rest, do what is left to do, in the thread that
        computes. What is cancelled ends with the portion under way."""
        with trio.move_on_after(_IDLE_SECONDS):
            await wanted.wait()
        while self._next_block < self._end_block and not wanted.is_set():
            first = self._next_block
            self._next_block = min(first + self._portion, self._end_block)
            await self._thread.run(self._runner.populate_kv_cache, first, self._next_block)
        await wanted.wait()
