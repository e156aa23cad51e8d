"""The CPU engine's threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve_kernels.native_object import NativeObject, check

if TYPE_CHECKING:
    from trioserve_kernels.native_library import Library

__all__ = ["ThreadPool"]


class ThreadPool(NativeObject):
    """Threads that compute together with the one that calls (`cpu/thread_pool.h`).

    Owns threads - 1 threads, until `close`. They spin for a short while after each call, then sleep.

    Raises:
      ValueError: threads is not between 1 and 1024.
      OSError: the system refuses to start so many threads.
    """

    def __init__(self, library: Library, threads: int) -> None:
        check("threads", threads, 1, 1024)
        functions = library.functions
        handle = functions.ts_pool_new(threads)
        super().__init__(library, handle, functions.ts_pool_free)
        if handle is None:
            msg = f"the system does not start {threads} threads"
            raise OSError(msg)
        self.threads = threads

    def read_bandwidth(self, size: int) -> float:
        """Bytes per second that the threads read together, the best of several times.

        size: of what they read, in bytes; larger than all caches, where the memory's speed is asked for.
        """
        check("size", size, 64 * self.threads, 2**40)
        return float(self.library.functions.ts_read_bandwidth(self.handle, size))
