"""Memory that native code reads and writes by its address."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from trioserve.memory_advice import POPULATE, advise

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["Buffer", "mapped_zeros", "populate"]


def mapped_zeros(size: int) -> np.ndarray:
    """uint8 [size] at a page's border, all zeros, in huge pages where the system has them.

    The system gives its pages as they are first touched, and takes all back when the array is dropped. In
    pages of 4 KiB, attention takes twice as long.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def populate(memory: np.ndarray) -> None:
    """Have the system give the pages of a part of `mapped_zeros` now, not as they are first touched.

    What they hold stays as it is. Blocks, without the GIL."""
    start = memory.ctypes.data
    advise(start, start + memory.nbytes, POPULATE)


class Buffer:
    """Rows that are overwritten in every step. Grows to the largest step, and is allocated no more then."""

    def __init__(self, dtype: DTypeLike, width: int) -> None:
        self._array = np.empty((0, width), dtype)
        self.address = self._array.ctypes.data

    def reserve(self, num_rows: int) -> int:
        """The address of at least `num_rows` rows; their contents are lost if there were fewer."""
        if num_rows > len(self._array):
            self._array = np.empty((num_rows, self._array.shape[1]), self._array.dtype)
            self.address = self._array.ctypes.data
        return self.address

    def rows(self, count: int) -> np.ndarray:
        """The first ones, [count, width], in place."""
        return self._array[:count]
