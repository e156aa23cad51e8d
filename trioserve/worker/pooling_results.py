"""From a text's hidden states to its result. Imports no torch.

Each text is computed by itself, so that its result does not depend on what was beside it, to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.config import Pooler
from trioserve.worker.pooling_head import Head

if TYPE_CHECKING:
    from trioserve.config import ClassActivation, PoolingType
    from trioserve.pooling_params import PoolingParams

__all__ = ["PoolingResults"]

_LEAST_NORM = 1e-12
"""As torch's normalize: zeros stay zeros."""


@attrs.frozen(eq=False)
class PoolingResults:
    """What a model's pooler makes of hidden states."""

    pooler: Pooler
    head: Head

    def compute(self, hidden: np.ndarray, params: PoolingParams) -> np.ndarray:
        """float32 [num_values], or [L, num_values] for the tasks token_..., from float32 [L, hidden_size] of
        a text. `params` have a task, and what they say has been checked."""
        per_token = params.task in {"token_embed", "token_classify"}
        pooled = hidden if per_token else _pool(hidden, self.pooler.pooling_type)
        values = np.atleast_2d(pooled)
        for layer in self.head:
            values = layer(values)
        result = self._activated(values, params) if self.pooler.labels else self._normalized(values, params)
        return np.ascontiguousarray(result if per_token else result[0], np.float32)

    def _activated(self, logits: np.ndarray, params: PoolingParams) -> np.ndarray:
        activates = self.pooler.activates if params.use_activation is None else params.use_activation
        return _activate(logits, self.pooler.activation) if activates else logits

    def _normalized(self, values: np.ndarray, params: PoolingParams) -> np.ndarray:
        normalizes = self.pooler.normalizes if params.use_activation is None else params.use_activation
        cut = values[:, : params.dimensions]
        if not normalizes:
            return cut
        norms: np.ndarray = np.linalg.norm(cut, axis=-1, keepdims=True)
        unit: np.ndarray = cut / np.maximum(norms, _LEAST_NORM)
        return unit


def _pool(hidden: np.ndarray, kind: PoolingType) -> np.ndarray:
    """[hidden_size] from [L, hidden_size]."""
    assert kind != "all", "there is no single result of all tokens"
    if kind == "mean":
        mean: np.ndarray = hidden.mean(0)
        return mean
    row: np.ndarray = hidden[0] if kind == "cls" else hidden[-1]
    return row


def _activate(logits: np.ndarray, activation: ClassActivation) -> np.ndarray:
    """Over the last axis. Exponents are at most 0, so nothing overflows."""
    if activation == "identity":
        return logits
    probabilities: np.ndarray
    if activation == "sigmoid":
        powers = np.exp(-np.abs(logits))
        probabilities = np.where(logits >= 0, 1, powers) / (1 + powers)
    else:
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities = powers / powers.sum(-1, keepdims=True)
    return probabilities
