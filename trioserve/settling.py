"""What a process does once it has started, and before it serves: it makes what stays cheap to live with."""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.memory_advice import COLLAPSE, HUGE_PAGES, advise

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["gather_in_huge_pages", "settle"]

_HUGE_PAGE = 2 * 2**20
_LARGEST = 256 * 2**20
"""Of the mappings that are looked at: larger ones are weights and caches, which ask for huge pages
themselves."""
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f:]+ 0 .*\n(?:(?!Rss).*\n)*Rss: +(\d+) kB", re.MULTILINE
)
"""Private, writable, of no file; where it begins and ends, and how much of it is in use."""


def settle() -> None:
    """What the start has made stays: a full garbage collection need not look at it again, which takes 0.1 s,
    and it moves into huge pages. For a process that is all ours: this is about all of its memory."""
    gc.collect()
    gc.freeze()
    gather_in_huge_pages()


def gather_in_huge_pages() -> int:
    """Have Linux move this process's heap into pages of 2 MiB. Returns the bytes that it was asked for.

    Between two steps of a model, which reads all its weights in each, what Python touches has left the
    processor's caches, and so have the tables of its pages; on a virtual machine a page takes two walks
    through tables. It is a wish: without huge pages all is as right, only slower. Mappings that are more
    than half empty, as stacks are, would grow, and are left alone.
    """
    num_bytes = 0
    for start, end in _dense_mappings():
        advise(start, end, HUGE_PAGES)  # for what it grows by
        num_bytes += advise(start, end, COLLAPSE, alignment=_HUGE_PAGE)
    return num_bytes


def _dense_mappings() -> Iterator[tuple[int, int]]:
    """Addresses of the first byte and of the one after the last, of each that has room for a huge page."""
    text = ""
    with suppress(OSError):
        text = Path("/proc/self/smaps").read_text()
    for mapping in _MAPPING.finditer(text):
        start, end = int(mapping[1], 16), int(mapping[2], 16)
        is_dense = int(mapping[3]) * 1024 * 2 >= end - start
        if is_dense and 2 * _HUGE_PAGE <= end - start <= _LARGEST:
            yield start, end
