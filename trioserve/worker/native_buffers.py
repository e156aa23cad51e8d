"""Memory that native code reads and writes by its address."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["Buffer", "mapped_zeros", "populate"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14


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

    What they hold stays as it is. A wish: old systems do not know it. Blocks, without the GIL."""
    if not sys.platform.startswith("linux"):
        return
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    whole = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(whole, max(0, end - whole), _MADV_POPULATE_WRITE)


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
