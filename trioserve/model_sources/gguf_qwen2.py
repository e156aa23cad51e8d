"""GGUF's `qwen2` architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.model_sources.gguf_architecture import GgufArchitecture, shared_config

if TYPE_CHECKING:
    from trioserve.model_sources.gguf_header import GgufHeader

__all__ = ["QWEN2"]


def _config(header: GgufHeader) -> dict[str, Any]:
    return shared_config(header) | {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


QWEN2 = GgufArchitecture(
    name="Qwen2ForCausalLM",
    make_config=_config,
    layer_biases={
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
    },
    # As in Qwen's own generation_config.json; the files name one of the two.
    end_tokens=("<|im_end|>", "<|endoftext|>"),
)
