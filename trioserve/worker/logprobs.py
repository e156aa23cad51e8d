"""Log probabilities as the model gave them, before any sampling parameter acted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trioserve.worker.batch import LogprobRow
from trioserve.worker.most_likely import highest_indices
from trioserve.worker.rows import take

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioserve.worker.rows import Row

__all__ = ["RawLogprobs", "Wanted", "log_softmax", "logprob_rows"]

_DTYPES = {"i": np.int32, "f": np.float32}


@attrs.frozen(eq=False)
class Wanted:
    """What to report of one position, beside the token that is there."""

    num_top: int
    """Most likely tokens; -1: all."""
    token_ids: Sequence[int] = ()
    """More, by id; those beyond the vocabulary are left out."""


@attrs.frozen(eq=False)
class RawLogprobs:
    """Taken before the logits are changed, read once the tokens are drawn."""

    rows: dict[int, Wanted]
    """The rows that ask for logprobs, in the order of `values`."""
    values: np.ndarray
    """fp32 [len(rows), vocab]: log softmax of the raw logits."""

    @classmethod
    def capture(cls, logits: np.ndarray, rows: Sequence[Row]) -> RawLogprobs | None:
        """None if no row asks. logits: fp32 [R, vocab]."""
        asked = {
            index: Wanted(row.params.logprobs or 0, row.params.logprob_token_ids)
            for index, row in enumerate(rows)
            if row.params.reports_logprobs
        }
        if not asked:
            return None
        return cls(asked, log_softmax(take(logits, list(asked))))

    def report(self, drawn: Sequence[int], kept: Iterable[Iterable[int]]) -> dict[int, LogprobRow]:
        """By row, of those that ask. drawn: the tokens of all rows; kept: the rows that count, in groups."""
        counting = set(chain.from_iterable(kept))
        chosen = {row: place for place, row in enumerate(self.rows) if row in counting}
        reported = logprob_rows(
            take(self.values, list(chosen.values())),
            [drawn[row] for row in chosen],
            [self.rows[row] for row in chosen],
        )
        return dict(zip(chosen, reported, strict=True))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """x - log(sum(exp(x))) of each row, fp32 [R, vocab]."""
    found = np.empty_like(logits)
    for row, x in enumerate(logits):  # each stays in the processor's cache
        shifted = x - x.max()
        np.subtract(shifted, np.log(np.exp(shifted).sum()), out=found[row])
    return found


def logprob_rows(values: np.ndarray, token_ids: Sequence[int], wanted: Sequence[Wanted]) -> list[LogprobRow]:
    """What is wanted of each row, its own token first.

    values: fp32 [R, vocab], log softmax; token_ids: R, the tokens that are there.
    """
    own = zip(values, token_ids, wanted, strict=True)
    return [_report(row, token_id, one) for row, token_id, one in own]


def _report(values: np.ndarray, token_id: int, wanted: Wanted) -> LogprobRow:
    top = _most_likely(values, wanted.num_top)
    rising = -values[top]
    inside = [token for token in wanted.token_ids if token < len(values)]
    named = [token_id, *inside]  # at most 129, each compared with all
    ranks = [1 + int(np.count_nonzero(values > values[token])) for token in named]
    return LogprobRow(
        _joined("i", named[:1], top, inside),
        _joined("f", values[named[:1]], values[top], values[inside]),
        # The first place of an equal value, in rising order: so many are strictly more likely.
        _joined("i", ranks[:1], 1 + np.searchsorted(rising, rising), ranks[1:]),
    )


def _most_likely(values: np.ndarray, count: int) -> np.ndarray:
    """The indices of the highest ones, from the highest down; -1: of all."""
    if count == 0:
        return np.empty(0, np.int64)
    return highest_indices(values, count)[:count] if count > 0 else highest_indices(values, len(values))


def _joined(typecode: str, *parts: object) -> array[Any]:
    """Compact, as the whole vocabulary of a long prompt is many numbers."""
    arrays = [np.asarray(part, _DTYPES[typecode]) for part in parts]
    return array(typecode, np.concatenate(arrays).tobytes())
