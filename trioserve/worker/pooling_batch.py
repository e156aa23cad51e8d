"""What the pooling core hands to its runner for one step, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trioserve.pooling_params import PoolingParams

__all__ = ["PooledSequence", "PoolingSequence"]


@attrs.frozen(kw_only=True, eq=False)
class PoolingSequence:
    """A whole text; a step computes all of it."""

    request_id: int
    token_ids: Sequence[int]
    token_type_ids: Sequence[int] | None = None
    """0 or 1 per token: which text of a pair it belongs to; None: all 0."""
    params: PoolingParams
    """With its task."""


@attrs.frozen(kw_only=True, eq=False)
class PooledSequence:
    """What a step gave for one text."""

    data: np.ndarray | None
    """float32 [num_values], or [num_tokens, num_values] for the tasks token_...; None if it failed."""
    failure: str | None = None
    """Why, for the log."""
