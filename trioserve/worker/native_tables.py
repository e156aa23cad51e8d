"""Block tables of many requests in one array, so that a step copies no Python list but its new tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from trioserve.worker.batch import ScheduledSequence

__all__ = ["BlockTables"]


@attrs.define(eq=False)
class _Known:
    """What has been taken in of a request."""

    tables: Sequence[Sequence[int]]
    row: int
    lengths: list[int]
    """Of each table, the entries that are in the array."""


class BlockTables:
    """A request is known by the identity of its `block_tables`: those only grow at their ends as long as it
    runs, and it gets new ones when it comes back from a preemption. Entries that became -1 since they were
    taken in keep their former value here: no layer looks at them.

    Bound: half more than the most sequences of a step so far. Those that are not in a step are forgotten when
    another needs their place; if such a one comes back, it pays for its whole table once more.
    """

    def __init__(self, num_groups: int) -> None:
        self._known: dict[int, _Known] = {}
        """By the id of the tables, which are kept alive here."""
        self._free: list[int] = []
        self._array = np.full((num_groups, 0, 0), -1, np.int32)
        """[groups, rows, width]."""

    def __len__(self) -> int:
        """How many requests it remembers something of."""
        return len(self._known)

    def take_in(self, sequences: Sequence[ScheduledSequence], width: int) -> np.ndarray:
        """The first `width` entries of the tables of a step's sequences, S in number.

        int32 [groups, S, width], contiguous. What lies behind a table's end is any number.
        """
        _, rows, columns = self._array.shape
        if len(sequences) > rows or width > columns:
            self._grow(len(sequences), width)
        tables = [sequence.block_tables for sequence in sequences]
        places = [self._row_of(own, tables) for own in tables]
        return np.ascontiguousarray(self._array[:, places, :width])

    def _row_of(self, tables: Sequence[Sequence[int]], step: Sequence[Sequence[Sequence[int]]]) -> int:
        known = self._known.get(id(tables))
        if known is None:
            if not self._free:
                self._forget_all_but(step)
            known = self._known[id(tables)] = _Known(tables, self._free.pop(), [0] * len(tables))
        for group, table in enumerate(tables):
            begin, end = known.lengths[group], len(table)
            if begin < end:
                self._copy(group, known.row, begin, table[begin:end])
                known.lengths[group] = end
        return known.row

    def _copy(self, group: int, row: int, begin: int, blocks: Sequence[int]) -> None:
        end = begin + len(blocks)
        if end > self._array.shape[2]:
            self._grow(0, end)
        self._array[group, row, begin:end] = blocks

    def _forget_all_but(self, step: Sequence[Sequence[Sequence[int]]]) -> None:
        for key in self._known.keys() - {id(tables) for tables in step}:
            self._free.append(self._known.pop(key).row)

    def _grow(self, num_rows: int, width: int) -> None:
        """To at least as many, and by half more than there were, so that it happens rarely."""
        groups, rows, columns = self._array.shape
        new_rows = rows if num_rows <= rows else max(num_rows, rows * 3 // 2)
        new_columns = columns if width <= columns else max(width, columns * 3 // 2)
        grown = np.full((groups, new_rows, new_columns), -1, np.int32)
        grown[:, :rows, :columns] = self._array
        self._free += range(rows, new_rows)
        self._array = grown
