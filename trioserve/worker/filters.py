"""From logits to one drawn token per row: temperature, min_p, top_k, top_p, and the draw.

A row's result depends on its own logits, parameters and uniform number only, to the bit: every row is
computed by itself. One of 49,152 logits takes about 0.1 ms, as only the most likely tokens are sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trioserve.worker.most_likely import highest_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.sampling_params import SamplingParams

__all__ = ["draw_tokens"]

_CANDIDATES = (64, 1024)
"""How many of the most likely tokens are sorted at first, and then, before all of them are."""

_SUMMED = 256
"""Weights that are summed up at first, where one of many is drawn."""


def draw_tokens(
    logits: Sequence[np.ndarray], params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[int]:
    """One token id per row.

    Each filter acts on what the one before left: `min_p` keeps tokens of at least min_p times the highest
    probability, `top_k` the k most likely, `top_p` the most likely ones until they hold top_p of what is
    left. Of equally likely tokens at the edge of top_k or top_p, those with lower ids are kept.

    logits: R, fp32 [vocab] each, at least one of them above -inf; params: R, none of them greedy;
    uniforms: R, in [0, 1).
    """
    with np.errstate(over="ignore"):  # logits of 1e38 at a low temperature: -inf is right
        return [_draw_row(*row) for row in zip(logits, params, uniforms, strict=True)]


def _draw_row(logits: np.ndarray, params: SamplingParams, uniform: float) -> int:
    highest = logits.max()
    if params.min_p == 0 and params.top_k <= 0 and params.top_p == 1:
        return _draw_of_many(_weights(logits, highest, params.temperature), uniform)
    if np.isneginf(logits.min()):
        possible = np.flatnonzero(logits > -np.inf)
        return int(possible[_draw_filtered(logits[possible], highest, params, uniform)])
    return _draw_filtered(logits, highest, params, uniform)


def _weights(logits: np.ndarray, highest: np.floating, temperature: float) -> np.ndarray:
    """What probabilities are proportional to, fp32: exp(logit / temperature), the highest made 1."""
    scaled = logits - highest
    scaled /= np.float32(temperature)
    weights: np.ndarray = np.exp(scaled, out=scaled)
    return weights


def _draw(running: np.ndarray, uniform: float) -> int:
    """Invert a cumulative distribution: the first index whose running sum exceeds uniform * sum.

    One uniform number and one pass. The other way to draw, a race of exponentials, would need one random
    number per token of the vocabulary. running: fp64 [N], rising, the last one above 0.
    """
    return int(np.searchsorted(running, uniform * running[-1], side="right"))


def _draw_of_many(weights: np.ndarray, uniform: float) -> int:
    """First one of the groups of neighbouring weights, then one in it by what is left of the number."""
    starts = np.arange(0, len(weights), _SUMMED)
    running = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    group = _draw(running, uniform)
    start = int(starts[group])
    within = weights[start : start + _SUMMED].cumsum(dtype=np.float64)
    before = running[group - 1] if group else 0.0
    # Rounded otherwise, the sum of the group may be a hair less than what is left.
    left = min(uniform * running[-1] - before, np.nextafter(within[-1], 0.0))
    return start + int(np.searchsorted(within, left, side="right"))


def _draw_filtered(logits: np.ndarray, highest: np.floating, params: SamplingParams, uniform: float) -> int:
    """Sort some candidates, then more, then all, until they hold all that the filters keep."""
    total = None
    if params.min_p == 0 and params.top_k <= 0:
        total = _weights(logits, highest, params.temperature).sum(dtype=np.float64)
    for size in (size for size in _CANDIDATES if params.top_k <= size < len(logits)):
        candidates = highest_indices(logits, size)
        weights = _weights(logits[candidates], highest, params.temperature).astype(np.float64)
        if (num_kept := _num_kept(weights, params, total)) is not None:
            return int(candidates[_draw(weights[:num_kept].cumsum(), uniform)])
    return _draw_of_all(_weights(logits, highest, params.temperature), params, uniform)


def _draw_of_all(weights: np.ndarray, params: SamplingParams, uniform: float) -> int:
    """Of very even distributions. Only the values are sorted, which takes a fifth of sorting indices."""
    falling = np.sort(weights)[::-1].astype(np.float64)
    num_kept = _num_kept(falling, params, falling.sum(), are_all=True)
    assert num_kept is not None
    lowest = np.float32(falling[num_kept - 1])
    kept = np.where(weights > lowest, weights, np.float32(0))
    num_equal = num_kept - np.count_nonzero(kept)
    kept[np.flatnonzero(weights == lowest)[:num_equal]] = lowest
    return _draw_of_many(kept, uniform)


def _num_kept(
    weights: np.ndarray, params: SamplingParams, total: float | None, *, are_all: bool = False
) -> int | None:
    """How many of the first candidates the filters keep, or None if they may keep others too.

    weights: fp64, of the candidates, from 1 down; total: of all weights, if min_p and top_k are off.
    """
    num_passing = _num_passing(weights, params)
    has_end = are_all or num_passing < len(weights)
    if params.top_p == 1:
        return num_passing if has_end else None
    running = weights[:num_passing].cumsum()
    if has_end:
        total = running[-1]
    if total is None or running[-1] < params.top_p * total:
        return None
    # The most likely one always stays, also where top_p * total is too small for a number.
    return 1 + int(np.searchsorted(running[:-1], params.top_p * total, side="left"))


def _num_passing(weights: np.ndarray, params: SamplingParams) -> int:
    """How many of the first ones min_p and top_k keep, at least 1."""
    num_passing = len(weights)
    if params.min_p > 0:
        num_passing = int(np.searchsorted(-weights, -params.min_p, side="right"))
    return min(num_passing, params.top_k) if params.top_k > 0 else num_passing
