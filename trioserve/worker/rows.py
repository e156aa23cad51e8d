"""The positions of a step that are drawn at: one per sequence, and one more after each draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from trioserve.worker.batch import ScheduledSequence
from trioserve.worker.histories import History

if TYPE_CHECKING:
    import numpy as np

    from trioserve.sampling_params import SamplingParams

__all__ = ["Row", "accepted", "drafts_of", "rows_of", "take"]


@attrs.define(eq=False)  # not frozen: one is made per position and step, at half the cost
class Row:
    """One row of the logits; not to be changed once made."""

    sequence: ScheduledSequence
    drafts: Sequence[int]
    """Those of its sequence that lie before it: it is drawn as if they had been."""
    history: History
    """Of its sequence, without drafts."""

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def position(self) -> int:
        """How many output tokens lie before it."""
        return len(self.sequence.output_token_ids) + len(self.drafts)

    def last_tokens(self, count: int) -> list[int]:
        """The last `count` >= 1 output tokens before it; fewer if there are not so many."""
        outputs = self.sequence.output_token_ids
        own = max(0, count - len(self.drafts))
        return [*outputs[max(0, len(outputs) - own) :], *self.drafts][-count:]


def drafts_of(sequence: ScheduledSequence) -> Sequence[int]:
    return sequence.token_ids[len(sequence.token_ids) - sequence.num_drafts :]


def accepted(drawn: Sequence[int], drafts: Sequence[int]) -> Sequence[int]:
    """From a sequence's rows: tokens while they are the drafts, and one more."""
    count = 0
    for token, draft in zip(drawn, drafts, strict=False):
        if token != draft:
            break
        count += 1
    return drawn[: count + 1]


def rows_of(sequence: ScheduledSequence, history: History) -> list[Row]:
    """1 + num_drafts rows, in the order of their positions."""
    drafts = drafts_of(sequence)
    return [Row(sequence, drafts[:before], history) for before in range(len(drafts) + 1)]


def take(values: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Some rows of [R, ...], in rising order. All of them are not copied: with a large vocabulary, that costs
    as much as to draw from them."""
    return values if len(rows) == len(values) else values[rows]
