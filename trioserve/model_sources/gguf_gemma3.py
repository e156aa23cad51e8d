"""GGUF's `gemma3` architecture: Gemma 3's text models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.model_sources.gguf_architecture import LAYER_WEIGHTS, GgufArchitecture, shared_config
from trioserve.model_sources.gguf_metadata import decimal, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from trioserve.model_sources.gguf_header import GgufHeader

__all__ = ["GEMMA3"]

_WINDOW_PATTERN = 6
"""Every sixth layer sees everything. Not in the file, nor is the next."""
_LOCAL_THETA = 10000.0
"""Of the rotation in the layers with a window."""
_LAYERS_OF_27B = 62
"""The one size that scales its queries by hidden size / heads instead of the heads' width."""
_SOFTCAP = "final_logit_softcapping"


def _config(header: GgufHeader) -> dict[str, Any]:
    config = shared_config(header)
    num_layers = config["num_hidden_layers"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config |= {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": per_head if num_layers == _LAYERS_OF_27B else config["head_dim"],
        "sliding_window": number(header, "attention.sliding_window", int),
        "layer_types": [
            "sliding_attention" if (layer + 1) % _WINDOW_PATTERN else "full_attention"
            for layer in range(num_layers)
        ],
        "rope_local_base_freq": _LOCAL_THETA,
    }
    if f"{header.architecture}.{_SOFTCAP}" in header.metadata:
        config[_SOFTCAP] = decimal(header, _SOFTCAP)
    return config


def _restore_norms(part: str, weight: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    """Gemma multiplies by 1 + weight, and llama.cpp's converter has added the 1 already."""
    return weight - 1 if part.endswith("norm") else weight


GEMMA3 = GgufArchitecture(
    name="Gemma3ForCausalLM",
    make_config=_config,
    layer_weights=LAYER_WEIGHTS
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    restore=_restore_norms,
    end_tokens=("<end_of_turn>",),
)
