"""The rotary position embedding's frequencies, plain or stretched to longer contexts. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trioserve.models.config import RotaryConfig

__all__ = ["rotary_frequencies"]


def rotary_frequencies(config: RotaryConfig, head_dim: int) -> np.ndarray:
    """Radians per token of each pair of a head's numbers: theta^(-2i / D), scaled. fp32 [D/2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.float32(config.theta) ** exponents
    if config.scaling == "linear":
        return frequencies / np.float32(config.factor)
    if config.scaling == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: np.ndarray, config: RotaryConfig) -> np.ndarray:
    """Llama 3.1's stretching: long waves by `factor`, short ones not at all, a linear blend between.

    With r = original context length / wavelength and s = (r - low) / (high - low) clipped to [0, 1], a
    frequency f becomes (1 - s) f / factor + s f.
    """
    turns = config.original_context_length * frequencies / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    stretched: np.ndarray = (1 - share) * frequencies / config.factor + share * frequencies
    return stretched
