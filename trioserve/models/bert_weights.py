"""The weights of a BERT. Imports no torch."""

from __future__ import annotations

import attrs
import numpy as np

__all__ = ["Affine", "BertLayerWeights", "BertWeights"]


@attrs.frozen(eq=False)
class Affine:
    """A matrix and a bias, or what a norm multiplies by and adds."""

    weight: np.ndarray
    """float32, [out_features, in_features] or [size]."""
    bias: np.ndarray
    """float32, [out_features] or [size]."""


@attrs.frozen(eq=False, kw_only=True)
class BertLayerWeights:
    query: Affine
    key: Affine
    value: Affine
    output: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    output_norm: Affine


@attrs.frozen(eq=False, kw_only=True)
class BertWeights:
    words: np.ndarray
    """float32 [vocab_size, hidden_size]; likewise the next."""
    positions: np.ndarray
    types: np.ndarray | None
    norm: Affine
    layers: tuple[BertLayerWeights, ...]
