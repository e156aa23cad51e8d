"""The config.json of Gemma 3's text models. Imports no torch."""

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

__all__ = ["gemma3_config"]

_CONTEXT_LENGTH = 131072


@attrs.frozen(kw_only=True)
class _RopesJson:
    """transformers 5 has one entry per kind of layer."""

    full_attention: RopeJson | None = None
    sliding_attention: RopeJson | None = None


@attrs.frozen(kw_only=True)
class _Gemma3Json:
    """The keys that we read; the defaults are those of transformers' Gemma3TextConfig, sizes apart."""

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(4)
    head_dim: int = size(256)
    query_pre_attn_scalar: float = size(256)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = size(_CONTEXT_LENGTH)
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    sliding_window: int | None = size(4096)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window_pattern: int = size(6)
    """Where `layer_types` does not say: every so many layers, one sees everything."""
    rope_parameters: _RopesJson | None = None
    rope_theta: float = size(1_000_000.0)
    """Up to transformers 4, for the layers that see everything, and so is the next."""
    rope_scaling: RopeJson | None = None
    rope_local_base_freq: float = size(10_000.0)
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    final_logit_softcapping: float | None = size(None)
    attn_logit_softcapping: Literal[None] = None
    use_bidirectional_attention: Literal[False] | None = False


def gemma3_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of a Gemma 3 text model from the contents of its config.json.

    Raises:
      ModelNotSupportedError: keys are missing or wrong, or ask for what is not implemented; names them all.
    """
    parsed = read_config(raw, _Gemma3Json)
    return DecoderConfig(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_heads=check_heads(parsed.num_attention_heads, parsed.num_key_value_heads),
        num_kv_heads=parsed.num_key_value_heads,
        head_dim=head_dim_of(parsed),
        layers=_layers(parsed),
        rms_norm_eps=parsed.rms_norm_eps,
        tie_word_embeddings=parsed.tie_word_embeddings,
        attention_scale=1 / math.sqrt(parsed.query_pre_attn_scalar),
        activation="gelu_tanh",
        qkv_bias=parsed.attention_bias,
        output_bias=parsed.attention_bias,
        query_key_norm=True,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(parsed.hidden_size),
        logit_softcap=parsed.final_logit_softcapping,
    )


def _layers(parsed: _Gemma3Json) -> tuple[LayerConfig, ...]:
    ropes = parsed.rope_parameters or _RopesJson(full_attention=parsed.rope_scaling)
    context_length = parsed.max_position_embeddings
    full = rotary_config(ropes.full_attention, theta=parsed.rope_theta, context_length=context_length)
    local_theta = parsed.rope_local_base_freq
    sliding = rotary_config(ropes.sliding_attention, theta=local_theta, context_length=context_length)
    default = [
        SLIDING if (index + 1) % parsed.sliding_window_pattern else FULL
        for index in range(parsed.num_hidden_layers)
    ]
    return layers_of(
        default if parsed.layer_types is None else parsed.layer_types,
        parsed.num_hidden_layers,
        full=LayerConfig(window=None, rotary=full),
        sliding=LayerConfig(window=parsed.sliding_window, rotary=sliding),
    )
