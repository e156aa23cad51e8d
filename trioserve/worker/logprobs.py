"""Log probabilities of sampled tokens, as the model gave them, before any sampling parameter acted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from trioserve.sampling_params import MAX_LOGPROBS
from trioserve.worker.batch import SampledToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.worker.batch import ScheduledSequence

__all__ = ["RawLogprobs"]


@attrs.frozen(eq=False)
class RawLogprobs:
    """Taken before the logits are changed, read once the tokens are drawn."""

    rows: list[int]
    """The rows that ask for logprobs."""
    widths: list[int]
    """How many of the most likely tokens each asks for."""
    values: torch.Tensor
    """fp32 [len(rows), vocab]: log softmax of the raw logits."""

    @classmethod
    def capture(cls, logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> RawLogprobs | None:
        """None if no row asks. logits: fp32 [R, vocab]."""
        asked = {row: s.params.logprobs for row, s in enumerate(sequences) if s.params.logprobs is not None}
        if not asked:
            return None
        rows = list(asked)
        return cls(rows, list(asked.values()), torch.log_softmax(logits[rows], dim=-1))

    def report(self, token_ids: Sequence[int]) -> dict[int, SampledToken]:
        """The sampled tokens with their logprobs, by row. token_ids: the tokens drawn, of all rows.

        A rank is 1 + the number of tokens that are strictly more likely.
        """
        drawn = torch.tensor([token_ids[row] for row in self.rows])
        drawn_values = self.values.gather(1, drawn[:, None])
        drawn_ranks = 1 + (self.values > drawn_values).sum(-1)
        # Always as many as anyone may ask for: which of two equally likely tokens comes first may depend on
        # how many are sought, and must not depend on the other rows.
        top = self.values.topk(min(MAX_LOGPROBS, self.values.shape[1]))
        top_ranks = 1 + (top.values[:, None, :] > top.values[:, :, None]).sum(-1)
        ids = torch.cat((drawn[:, None], top.indices), 1).tolist()
        values = torch.cat((drawn_values, top.values), 1).tolist()
        ranks = torch.cat((drawn_ranks[:, None], top_ranks), 1).tolist()
        return {
            row: SampledToken(ids[i][0], ids[i][: 1 + width], values[i][: 1 + width], ranks[i][: 1 + width])
            for i, (row, width) in enumerate(zip(self.rows, self.widths, strict=True))
        }
