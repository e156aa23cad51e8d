"""The config.json of the Llama family. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.models.config import DecoderConfig, LayerConfig
from trioserve.models.config_json import read_config
from trioserve.models.config_llama_like import LlamaLikeJson

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["llama_config"]


@attrs.frozen(kw_only=True)
class _LlamaJson(LlamaLikeJson):
    attention_bias: bool = False
    mlp_bias: bool = False


def llama_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of a Llama-family model from the contents of its config.json.

    Raises:
      ModelNotSupportedError: keys are missing or wrong, or ask for what is not implemented; names them all.
    """
    parsed = read_config(raw, _LlamaJson)
    return parsed.decoder_config(
        [LayerConfig(window=None, rotary=parsed.rotary)] * parsed.num_hidden_layers,
        qkv_bias=parsed.attention_bias,
        output_bias=parsed.attention_bias,
        mlp_bias=parsed.mlp_bias,
    )
