"""Memory that native code reads and writes by its address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["Buffer", "aligned_zeros"]

_ALIGNMENT = 64


def aligned_zeros(size: int) -> np.ndarray:
    """uint8 [size] at a multiple of 64, all zeros. The system gives its pages as they are first touched."""
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


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
