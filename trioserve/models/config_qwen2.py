"""The config.json of Qwen2 and Qwen2.5. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import attrs

from trioserve.models.config import DecoderConfig, LayerConfig
from trioserve.models.config_json import (
    FULL,
    SLIDING,
    RopeJson,
    check_heads,
    head_dim_of,
    layers_of,
    read_config,
    rotary_config,
    size,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["qwen2_config"]


@attrs.frozen(kw_only=True)
class _Qwen2Json:
    """The keys that we read; the defaults are those of transformers' Qwen2Config, sizes apart."""

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int | None = size(None)
    head_dim: int | None = size(None)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = size(32768)
    hidden_act: Literal["silu"] = "silu"
    rope_theta: float = size(10000.0)
    rope_scaling: RopeJson | None = None
    rope_parameters: RopeJson | None = None
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = size(4096)
    max_window_layers: int = 28
    """The first layer with a window, where `layer_types` does not say."""
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None


def qwen2_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of a Qwen2 model from the contents of its config.json.

    Raises:
      ModelNotSupportedError: keys are missing or wrong, or ask for what is not implemented; names them all.
    """
    parsed = read_config(raw, _Qwen2Json)
    num_kv_heads = parsed.num_key_value_heads or parsed.num_attention_heads
    head_dim = head_dim_of(parsed)
    return DecoderConfig(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_heads=check_heads(parsed.num_attention_heads, num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=_layers(parsed),
        rms_norm_eps=parsed.rms_norm_eps,
        tie_word_embeddings=parsed.tie_word_embeddings,
        attention_scale=1 / math.sqrt(head_dim),
        qkv_bias=True,
    )


def _layers(parsed: _Qwen2Json) -> tuple[LayerConfig, ...]:
    rotary = rotary_config(
        parsed.rope_parameters or parsed.rope_scaling,
        theta=parsed.rope_theta,
        context_length=parsed.max_position_embeddings,
    )
    window = parsed.sliding_window if parsed.use_sliding_window else None
    num_full = parsed.num_hidden_layers if window is None else parsed.max_window_layers
    default = [FULL if index < num_full else SLIDING for index in range(parsed.num_hidden_layers)]
    return layers_of(
        default if parsed.layer_types is None else parsed.layer_types,
        parsed.num_hidden_layers,
        full=LayerConfig(window=None, rotary=rotary),
        sliding=LayerConfig(window=window, rotary=rotary),
    )
