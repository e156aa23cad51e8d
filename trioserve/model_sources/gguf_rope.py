"""Which scaling of its rotary embeddings a GGUF file asks for, as config.json's `rope_scaling`.

GGUF names linear scaling in its metadata. Llama 3's it stores as the finished divisors, one for each
frequency; the parameters that gave them are found again here, and checked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trioserve.errors import ModelNotSupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trioserve.model_sources.gguf_header import GgufHeader

__all__ = ["ROPE_FACTORS", "llama3_divisors", "rope_scaling"]

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: one divisor for each rotary frequency, from which the config's rope_scaling is told."""

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""As in every Llama 3 published; only the factor differs (8 in 3.1, 32 in 3.2)."""


def rope_scaling(
    header: GgufHeader, config: Mapping[str, Any], divisors: Sequence[float] | None
) -> dict[str, Any] | None:
    """config.json's `rope_scaling`; None: not scaled. `divisors`: the file's rope_freqs.weight.

    Raises:
      ModelNotSupportedError: another kind of scaling.
    """
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if divisors is not None and max(divisors) > 1.0:
        return _match_llama3(config, divisors)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _factor(header)}
    raise ModelNotSupportedError(
        f"The file scales its rotary embeddings by {kind!r}; linear and llama3 are supported."
    )


def _factor(header: GgufHeader) -> float:
    key = f"{header.architecture}.rope.scaling.factor"
    factor = header.metadata.get(key)
    if not isinstance(factor, float) or factor <= 0:
        raise ModelNotSupportedError(f"The file's {key} must be a positive number, and is {factor!r}.")
    return factor


def _match_llama3(config: Mapping[str, Any], divisors: Sequence[float]) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": round(max(divisors), 4), **_LLAMA3}
    expected = llama3_divisors(config["head_dim"], config["rope_theta"], scaling)
    same = len(expected) == len(divisors) and all(
        math.isclose(ours, theirs, rel_tol=1e-4) for ours, theirs in zip(expected, divisors, strict=True)
    )
    if not same:
        raise ModelNotSupportedError(
            "The file scales its rotary frequencies (rope_freqs.weight) in another way than Llama 3 does."
        )
    return scaling


def llama3_divisors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> list[float]:
    """By how much Llama 3 divides each of its head_dim / 2 rotary frequencies.

    Wavelengths below original / high_freq_factor stay, those above original / low_freq_factor are
    stretched by the factor, those between are interpolated in the frequency (transformers, `llama3`
    in modeling_rope_utils).
    """
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return divisors
