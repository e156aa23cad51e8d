"""From logits to one drawn token per row: temperature, min_p, top_k, top_p, and the draw.

A row's result depends on its own logits, parameters and uniform number only, to the bit: every decision
below (how many candidates are sorted, whether a row is filtered at all) is made from the row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from trioserve.worker.rows import take

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.sampling_params import SamplingParams

__all__ = ["draw_tokens"]

_CANDIDATES = (64, 1024)
"""How many of the most likely tokens are sorted at first, and then, before the whole vocabulary is.

Sorting all of 49,152 takes 2.7 ms a row, the top 64 take 0.09 ms, and they nearly always settle a row.
"""


def draw_tokens(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: torch.Tensor
) -> torch.Tensor:
    """One token id per row, int64 [R].

    Each filter acts on what the one before left: `min_p` keeps tokens of at least min_p times the highest
    probability, `top_k` the k most likely, `top_p` the most likely ones until they hold top_p of what is
    left. Between equally likely tokens at the edge of top_k or top_p the choice is arbitrary, but fixed.

    logits: fp32 [R, vocab]; params: R, none of them greedy; uniforms: fp64 [R], in [0, 1).
    """
    temperatures = torch.tensor([p.temperature for p in params])
    probabilities = torch.softmax(logits / temperatures[:, None], dim=-1)
    filtered = [row for row, p in enumerate(params) if _is_filtered(p)]
    unfiltered = [row for row, p in enumerate(params) if not _is_filtered(p)]
    drawn = torch.empty(len(params), dtype=torch.int64)
    if unfiltered:
        drawn[unfiltered] = _draw(take(probabilities, unfiltered).double(), uniforms[unfiltered])
    if filtered:
        drawn[filtered] = _draw_filtered(
            take(probabilities, filtered), _Limits.of([params[row] for row in filtered]), uniforms[filtered]
        )
    return drawn


def _is_filtered(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution: the first index whose running sum exceeds uniform * sum.

    One uniform number and one pass per row. The other way to draw without a sort, a race of exponentials,
    would need one random number per token of the vocabulary.
    weights: fp64 [R, N], not all zero.
    """
    running = weights.cumsum(-1)
    targets = uniforms[:, None] * running[:, -1:]
    return torch.searchsorted(running, targets, right=True)[:, 0]


@attrs.frozen(eq=False)
class _Limits:
    """The filters' parameters, fp64 or int64 [R, 1] each; a filter that is off lets everything pass."""

    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> _Limits:
        unlimited = torch.iinfo(torch.int64).max
        return cls(
            torch.tensor([[p.min_p] for p in params], dtype=torch.float64),
            torch.tensor([[p.top_k if p.top_k > 0 else unlimited] for p in params]),
            torch.tensor([[p.top_p] for p in params], dtype=torch.float64),
        )

    def __getitem__(self, rows: torch.Tensor) -> _Limits:
        return _Limits(self.min_p[rows], self.top_k[rows], self.top_p[rows])


def _draw_filtered(probabilities: torch.Tensor, limits: _Limits, uniforms: torch.Tensor) -> torch.Tensor:
    """Sort ever more candidates, until those of every row hold all that its filters keep."""
    num_rows, vocab_size = probabilities.shape
    drawn = torch.empty(num_rows, dtype=torch.int64)
    pending = torch.arange(num_rows)
    for size in (*(size for size in _CANDIDATES if size < vocab_size), vocab_size):
        candidates = take(probabilities, pending).topk(size)
        kept, settled = _filter(candidates.values.double(), limits[pending], is_whole=size == vocab_size)
        places = _draw(kept[settled], uniforms[pending[settled]])
        drawn[pending[settled]] = candidates.indices[settled].gather(1, places[:, None])[:, 0]
        pending = pending[~settled]
        if len(pending) == 0:
            break
    return drawn


def _filter(
    candidates: torch.Tensor, limits: _Limits, *, is_whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero the candidates that the filters drop; and tell in which rows nothing beyond them would be kept.

    candidates: fp64 [R, N], probabilities in falling order; is_whole: N is the vocabulary.
    Returns fp64 [R, N] and bool [R]; the first is right only where the second is True.
    """
    places = torch.arange(candidates.shape[1])
    passes = (candidates >= limits.min_p * candidates[:, :1]) & (places < limits.top_k)
    kept = candidates * passes
    running = kept.cumsum(-1)
    cut_off = ~passes[:, -1:]  # min_p or top_k end among the candidates, so that their sum is known
    unlimited = (limits.min_p == 0) & (limits.top_k > torch.iinfo(torch.int32).max)
    total = torch.where(unlimited & ~torch.tensor(is_whole), 1.0, running[:, -1:])
    before = running - kept
    # The most likely one always stays, also where top_p * total is too small for a number.
    kept = kept * ((before < limits.top_p * total) | (places == 0))
    settled = cut_off | (unlimited & (running[:, -1:] >= limits.top_p)) | torch.tensor(is_whole)
    return kept, settled[:, 0]
