"""How a model's matrices are stored, and so what they can be served in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.errors import InvalidConfigError, ModelSourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.config import ModelConfig

__all__ = ["BLOCK_TYPES", "block_types", "check_quantization", "rounded_types"]

BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""GGUF's types that are served as they are; a converted directory has them as bytes."""

_PLAIN = ("F32", "F16", "BF16")


def block_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The types of blocks in a directory with this config.json, most frequent first."""
    return tuple(name for name in _types(config) if name in BLOCK_TYPES)


def rounded_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Types whose matrices were dequantized and rounded to bfloat16 when the GGUF file was converted."""
    return tuple(name for name in _types(config) if name not in (*BLOCK_TYPES, *_PLAIN))


def check_quantization(wanted: ModelConfig, config: Mapping[str, Any]) -> None:
    """No matrix is quantized twice: that would add the second error to the first.

    Raises:
      InvalidConfigError: it would be.
    """
    quantized = [name for name in _types(config) if name not in _PLAIN]
    if wanted.quantization in {"int8", "int4"} and quantized:
        raise InvalidConfigError(
            f"quantization must be auto (as it is stored) or none for {wanted.model}, whose weights are "
            f"quantized already ({', '.join(quantized)}), got {wanted.quantization!r}.",
            field="quantization",
        )


def _types(config: Mapping[str, Any]) -> list[str]:
    found = config.get("gguf_types", {})
    if not isinstance(found, dict):
        raise ModelSourceError(f"config.json's gguf_types must be a JSON object, and is {found!r:.80}.")
    return list(found)
