"""How a step's rows are cut into parts, and what each row sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from trioserve.worker.attention_parts import Batch, Chunk, Pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.worker.attention_parts import Part
    from trioserve.worker.batch import ScheduledSequence

__all__ = ["Planner", "new_slots", "sort_key"]

_FEW = 16
"""New tokens of a sequence that is attended together with others: a draft of 15 and the token before it."""

_MAX_BATCH_KEYS = 16384
"""Of all sequences of a batch, padding included: bounds the gathered copy (12 MB for SmolLM2)."""

_MAX_CHUNK = 512
"""New tokens of a chunk behind a window: bounds its mask, and the pages that it gathers."""

_SINGLE, _SHORT, _LONG = range(3)


def _kind(sequence: ScheduledSequence) -> int:
    num_new = len(sequence.token_ids)
    return _SINGLE if num_new == 1 else _SHORT if num_new <= _FEW else _LONG


def sort_key(sequence: ScheduledSequence) -> tuple[int, int]:
    """Of the order in a step: single tokens, then a few, both by length (to pad little), then many."""
    kind = _kind(sequence)
    return kind, 0 if kind == _LONG else sequence.start


@attrs.frozen(kw_only=True)
class Planner:
    """Makes the plans for layers that see `window` tokens back."""

    window: int | None
    block_size: int
    queries_per_key: int
    """Query heads that share a key-value head."""
    dtype: torch.dtype

    def plan(self, sequences: Sequence[ScheduledSequence]) -> list[Part]:
        """For sequences in the order of `sort_key`. The parts' rows cover the step's, in order."""
        parts: list[Part] = []
        row = 0
        for members in self._cut(sequences):
            first = sequences[members[0]]
            if _kind(first) == _LONG:
                parts += self._chunks(first, members[0], row)
            else:
                parts.append(self._batch(sequences, members, row))
            row += sum(len(sequences[index].token_ids) for index in members)
        return parts

    def _cut(self, sequences: Sequence[ScheduledSequence]) -> Iterator[range]:
        """Long ones alone; the others so that padding at most doubles one (of over 8 pages)."""
        start, narrowest = 0, 0
        for index, sequence in enumerate(sequences):
            width = self._pages(sequence, index).width
            if index > start:
                unlike = _kind(sequence) == _LONG or _kind(sequence) != _kind(sequences[start])
                too_wide = width > max(8, 2 * narrowest)
                too_many = (index - start + 1) * width * self.block_size > _MAX_BATCH_KEYS
                if unlike or too_wide or too_many:
                    yield range(start, index)
                    start = index
            if index == start:
                narrowest = width
        yield range(start, len(sequences))

    def _pages(self, sequence: ScheduledSequence, index: int, new: slice | None = None) -> Pages:
        """All that the new tokens see; `new`: that some of them see."""
        offset, stop, _ = (new or slice(None)).indices(len(sequence.token_ids))
        first = 0 if self.window is None else max(0, sequence.start + offset - self.window + 1)
        return Pages(index, first // self.block_size, -(-(sequence.start + stop) // self.block_size))

    def _batch(self, sequences: Sequence[ScheduledSequence], members: range, row: int) -> Batch:
        starts = np.array([sequences[index].start for index in members])
        counts = np.array([len(sequences[index].token_ids) for index in members])
        pages = [self._pages(sequences[index], index) for index in members]
        width = max(p.width for p in pages)
        num_new = int(counts.max())
        # A place beyond a sequence's own tokens holds the last of them again.
        offsets = np.minimum(np.arange(num_new), counts[:, None] - 1)
        first_keys = np.array([p.first for p in pages]) * self.block_size
        mask = self._mask(starts[:, None] + offsets - first_keys[:, None], width)
        if num_new > 1:
            mask = mask.repeat_interleave(self.queries_per_key, dim=1)
        rows = slice(row, row + int(counts.sum()))
        return Batch(rows, num_new, pages, width, *_padding(counts, offsets), mask[:, None])

    def _chunks(self, sequence: ScheduledSequence, index: int, row: int) -> Iterator[Chunk]:
        num_new = len(sequence.token_ids)
        if sequence.start == 0 and (self.window is None or num_new <= self.window):
            yield Chunk(slice(row, row + num_new), None, None)
            return
        step = num_new if self.window is None else _MAX_CHUNK
        for first in range(0, num_new, step):
            new = slice(first, min(first + step, num_new))
            pages = self._pages(sequence, index, new)
            skipped = pages.first * self.block_size
            newest = np.arange(sequence.start + new.start, sequence.start + new.stop) - skipped
            yield Chunk(slice(row + new.start, row + new.stop), pages, self._mask(newest, pages.width))

    def _mask(self, newest: np.ndarray, width: int) -> torch.Tensor:
        """[..., width * block_size]: what each row sees. newest: [...], its own place among the keys."""
        keys = torch.arange(width * self.block_size)
        own = torch.from_numpy(newest)[..., None]
        hidden = keys > own
        if self.window is not None:
            hidden |= keys <= own - self.window
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)


def _padding(counts: np.ndarray, offsets: np.ndarray) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`Batch.padded_rows` and `Batch.places`. offsets: [B, num_new], the token in each place."""
    num_new = offsets.shape[1]
    if (counts == num_new).all():
        return None, None
    first_rows = np.cumsum(counts) - counts
    places = np.flatnonzero(np.arange(num_new) < counts[:, None])
    return torch.from_numpy((first_rows[:, None] + offsets).reshape(-1)), torch.from_numpy(places)


def new_slots(
    sequences: Sequence[ScheduledSequence], tables: Sequence[Sequence[int]], block_size: int
) -> torch.Tensor:
    """The place in the cache of each new token: int64 [T]. tables: one per sequence."""
    slots = [_slots(*pair, block_size) for pair in zip(sequences, tables, strict=True)]
    return torch.from_numpy(np.concatenate(slots))


def _slots(sequence: ScheduledSequence, table: Sequence[int], block_size: int) -> np.ndarray:
    end = sequence.start + len(sequence.token_ids)
    if end == sequence.start + 1:
        block, offset = divmod(sequence.start, block_size)
        return np.array([table[block] * block_size + offset])
    first_block = sequence.start // block_size
    blocks = np.asarray(table[first_block : -(-end // block_size)], np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size)
    skip = sequence.start - first_block * block_size
    return slots.reshape(-1)[skip : skip + len(sequence.token_ids)]
