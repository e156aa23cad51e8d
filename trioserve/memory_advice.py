"""What Linux is told about memory: wishes. Where one is not granted all is as right, only slower."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Final

__all__ = ["COLLAPSE", "HUGE_PAGES", "POPULATE", "advise"]

HUGE_PAGES: Final = 14
"""In pages of 2 MiB from now on, where pages are missing."""
POPULATE: Final = 23
"""Bring all pages now; what they hold stays as it is. Linux 5.14."""
COLLAPSE: Final = 25
"""Move what is there into pages of 2 MiB. Linux 6.1."""


def advise(start: int, end: int, advice: int, *, alignment: int = mmap.PAGESIZE) -> int:
    """Give advice about the whole pages between two addresses, of so many bytes each. Returns the number of
    bytes that it is about. Blocks, without the GIL."""
    whole = -(-start // alignment) * alignment
    size = max(0, end // alignment * alignment - whole)
    if not sys.platform.startswith("linux") or not size:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(whole, size, advice)
    return size
