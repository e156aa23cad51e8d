"""The config.json of the Llama family. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import attrs

from trioserve.models.config import DecoderConfig, LayerConfig
from trioserve.models.config_json import RopeJson, check_heads, head_dim_of, read_config, rotary_config, size

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["llama_config"]


@attrs.frozen(kw_only=True)
class _LlamaJson:
    """The keys that we read; the defaults are those of transformers' LlamaConfig.

    The sizes have no default here: a file that leaves them out is damaged.
    """

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int | None = size(None)
    head_dim: int | None = size(None)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = size(2048)
    hidden_act: Literal["silu"] = "silu"
    rope_theta: float = size(10000.0)
    rope_scaling: RopeJson | None = None
    rope_parameters: RopeJson | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


def llama_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of a Llama-family model from the contents of its config.json.

    Raises:
      ModelNotSupportedError: keys are missing or wrong, or ask for what is not implemented; names them all.
    """
    parsed = read_config(raw, _LlamaJson)
    num_kv_heads = parsed.num_key_value_heads or parsed.num_attention_heads
    head_dim = head_dim_of(parsed)
    rotary = rotary_config(
        parsed.rope_parameters or parsed.rope_scaling,
        theta=parsed.rope_theta,
        context_length=parsed.max_position_embeddings,
    )
    return DecoderConfig(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_heads=check_heads(parsed.num_attention_heads, num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerConfig(window=None, rotary=rotary),) * parsed.num_hidden_layers,
        rms_norm_eps=parsed.rms_norm_eps,
        tie_word_embeddings=parsed.tie_word_embeddings,
        attention_scale=1 / math.sqrt(head_dim),
        qkv_bias=parsed.attention_bias,
        output_bias=parsed.attention_bias,
        mlp_bias=parsed.mlp_bias,
    )
