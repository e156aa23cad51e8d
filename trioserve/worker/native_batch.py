"""A step in the form that the native decoder takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.worker.native_tables import BlockTables
from trioserve_kernels.native import StepStructure, step_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.worker.batch import ScheduledSequence

__all__ = ["NativeBatch", "NativeBatches"]


@attrs.frozen(eq=False)
class NativeBatch:
    """T tokens of S sequences, laid end to end in their order."""

    step: StepStructure
    num_tokens: int
    first_rows: list[int]
    """Of each sequence's first token."""
    arrays: tuple[np.ndarray, ...]
    """What the step refers to."""


class NativeBatches:
    """Makes them; remembers the block tables of the requests that it has seen."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = BlockTables(num_groups)

    def make(self, sequences: Sequence[ScheduledSequence]) -> NativeBatch:
        token_ids: list[int] = []
        first_rows: list[int] = []
        for sequence in sequences:
            first_rows.append(len(token_ids))
            token_ids += sequence.token_ids
        starts = np.array([*first_rows, len(token_ids)], np.int32)
        longest = max(s.start + len(s.token_ids) for s in sequences)
        arrays = (
            np.array(token_ids, np.int32),
            _positions(np.array([sequence.start for sequence in sequences], np.int32), starts),
            starts,
            self._tables.take_in(sequences, -(-longest // self._block_size)),
        )
        return NativeBatch(step_of(*arrays), len(token_ids), first_rows, arrays)


def _positions(first: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """int32 [T]. first: of each sequence, the position of its first token."""
    num_tokens = int(starts[-1])
    if num_tokens == len(first):
        return first
    offsets = np.repeat(first - starts[:-1], np.diff(starts))
    return offsets + np.arange(num_tokens, dtype=np.int32)
