"""The rotary position embedding's frequencies, plain or stretched to longer contexts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trioserve.models.config import RotaryConfig

__all__ = ["rotary_frequencies"]


def rotary_frequencies(config: RotaryConfig, head_dim: int) -> torch.Tensor:
    """Radians per token of each pair of a head's numbers: theta^(-2i / D), scaled. fp32 [D/2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.scaling == "linear":
        return frequencies / config.factor
    if config.scaling == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: torch.Tensor, config: RotaryConfig) -> torch.Tensor:
    """Llama 3.1's stretching: long waves by `factor`, short ones not at all, a linear blend between.

    With r = original context length / wavelength and s = (r - low) / (high - low) clipped to [0, 1], a
    frequency f becomes (1 - s) f / factor + s f.
    """
    turns = config.original_context_length * frequencies / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * frequencies / config.factor + share * frequencies
