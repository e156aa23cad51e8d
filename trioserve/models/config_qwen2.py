"""The config.json of Qwen2 and Qwen2.5. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs

from trioserve.models.config import DecoderConfig, LayerConfig
from trioserve.models.config_json import FULL, SLIDING, layers_of, read_config, size
from trioserve.models.config_llama_like import LlamaLikeJson

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["qwen2_config"]


@attrs.frozen(kw_only=True)
class _Qwen2Json(LlamaLikeJson):
    max_position_embeddings: int = size(32768)
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
    return parsed.decoder_config(_layers(parsed), qkv_bias=True)


def _layers(parsed: _Qwen2Json) -> tuple[LayerConfig, ...]:
    window = parsed.sliding_window if parsed.use_sliding_window else None
    num_full = parsed.num_hidden_layers if window is None else parsed.max_window_layers
    default = [FULL if index < num_full else SLIDING for index in range(parsed.num_hidden_layers)]
    return layers_of(
        default if parsed.layer_types is None else parsed.layer_types,
        parsed.num_hidden_layers,
        full=LayerConfig(window=None, rotary=parsed.rotary),
        sliding=LayerConfig(window=window, rotary=parsed.rotary),
    )
