"""Where the beams of searches keep the keys and values of their texts: pages beside the scheduler's blocks.

Beams that have pages in common share those that are full; the one that is being written to is copied for all
beams but the first that go on from the same. So what moves per token is a page per beam at most, however long
the text is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BeamPages", "PageCopy"]


@attrs.frozen
class PageCopy:
    """Keys and values to be copied, in all layers, before anything else is computed."""

    source: int
    target: int


class BeamPages:
    """The pages [first, first + count) of the KV cache.

    Args:
      count: `MAX_BEAM_WIDTH` whole texts for each sequence that can run, so there always is one.
    """

    def __init__(self, first: int, count: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(first + count - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: set[int]) -> None:
        self._free += sorted(pages, reverse=True)

    def fork(
        self, tables: Sequence[Sequence[int]], parents: Sequence[int], length: int
    ) -> tuple[list[list[int]], list[PageCopy]]:
        """The tables of new beams, with room for the position `length`, below which all is as in their
        parents' tables. Pages of `tables` that no new beam has are free.

        tables: of all beams so far, each covers `length` positions. parents: by new beam.
        """
        num_full = length // self.page_size
        new = [list(tables[parent][:num_full]) for parent in parents]
        heirs: dict[int, int] = {}  # parent -> the new beam that takes its last page
        if length % self.page_size:
            for index, parent in enumerate(parents):
                heirs.setdefault(parent, index)
        for parent, index in heirs.items():
            new[index].append(tables[parent][num_full])
        kept = {page for table in new for page in table}
        self.give_back({page for table in tables for page in table} - kept)
        copies = []
        for table, parent in zip(new, parents, strict=True):
            if len(table) == num_full:
                table.extend(self.take(1))
                if parent in heirs:
                    copies.append(PageCopy(tables[parent][num_full], table[-1]))
        return new, copies
