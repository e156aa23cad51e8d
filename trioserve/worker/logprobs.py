"""Log probabilities as the model gave them, before any sampling parameter acted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from trioserve.worker.batch import LogprobRow
from trioserve.worker.rows import take

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioserve.worker.rows import Row

__all__ = ["RawLogprobs", "Wanted", "logprob_rows"]

_WIDTHS = (20, 256)
"""How many of the most likely tokens are sought at first; who wants more gets the vocabulary sorted.

Not as many as the widest row of a batch asks for: which of two equally likely tokens comes first may depend
on how many are sought, and must not depend on the other rows.
"""


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
    values: torch.Tensor
    """fp32 [len(rows), vocab]: log softmax of the raw logits."""

    @classmethod
    def capture(cls, logits: torch.Tensor, rows: Sequence[Row]) -> RawLogprobs | None:
        """None if no row asks. logits: fp32 [R, vocab]."""
        asked = {
            index: Wanted(row.params.logprobs or 0, row.params.logprob_token_ids)
            for index, row in enumerate(rows)
            if row.params.reports_logprobs
        }
        if not asked:
            return None
        return cls(asked, torch.log_softmax(take(logits, list(asked)), dim=-1))

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


def logprob_rows(
    values: torch.Tensor, token_ids: Sequence[int], wanted: Sequence[Wanted]
) -> list[LogprobRow]:
    """What is wanted of each row, its own token first.

    values: fp32 [R, vocab], log softmax; token_ids: R, the tokens that are there.
    """
    vocab_size = values.shape[1]
    found: dict[int, LogprobRow] = {}
    widths = [_width(w.num_top, vocab_size) for w in wanted]
    for width in set(widths):
        group = [row for row, w in enumerate(widths) if w == width]
        reported = _Top(take(values, group), width).rows([(token_ids[row], wanted[row]) for row in group])
        found |= zip(group, reported, strict=True)
    return [found[row] for row in range(len(wanted))]


def _width(num_top: int, vocab_size: int) -> int:
    fitting = (width for width in _WIDTHS if 0 <= num_top <= width < vocab_size)
    return next(fitting, vocab_size)


class _Top:
    """The `width` most likely tokens of several rows, in falling order. values: fp32 [R, vocab]."""

    def __init__(self, values: torch.Tensor, width: int) -> None:
        self._values = values
        if width == values.shape[1]:
            logprobs, token_ids = values.sort(descending=True, stable=True)
        else:
            logprobs, token_ids = values.topk(width)
        self._token_ids = token_ids.numpy().astype(np.int32)
        self._logprobs = logprobs.numpy()
        # The first place of an equal value, in rising order: so many are strictly more likely.
        rising = -logprobs
        self._ranks = (1 + torch.searchsorted(rising, rising)).numpy().astype(np.int32)

    def rows(self, wanted: Sequence[tuple[int, Wanted]]) -> list[LogprobRow]:
        own = torch.tensor([[token_id] for token_id, _ in wanted])
        own_values = self._values.gather(1, own)
        own_ranks = 1 + (self._values > own_values).sum(-1)
        rows = []
        for row, (token_id, one) in enumerate(wanted):
            top = slice(0, one.num_top if one.num_top >= 0 else None)
            named = self._named(row, one.token_ids)
            rows.append(
                LogprobRow(
                    _joined("i", [token_id], self._token_ids[row, top], named[0]),
                    _joined("f", own_values[row], self._logprobs[row, top], named[1]),
                    _joined("i", [own_ranks[row]], self._ranks[row, top], named[2]),
                )
            )
        return rows

    def _named(self, row: int, token_ids: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
        values = self._values[row]
        inside = [token for token in token_ids if token < len(values)]
        named = values[inside]
        ranks = 1 + (values > named[:, None]).sum(-1)  # at most 128 comparisons with each token
        return inside, named.numpy(), ranks.numpy()


def _joined(typecode: str, own: object, top: np.ndarray, named: object) -> array[Any]:
    """Compact, as the whole vocabulary of a long prompt is many numbers."""
    parts = [np.asarray(part, top.dtype) for part in (own, top, named)]
    return array(typecode, np.concatenate(parts).tobytes())
