"""GGUF's `llama` architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.model_sources.gguf_architecture import GgufArchitecture, shared_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from trioserve.model_sources.gguf_header import GgufHeader

__all__ = ["LLAMA"]


def _config(header: GgufHeader) -> dict[str, Any]:
    return shared_config(header) | {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _restore_row_order(part: str, weight: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    """Undo what llama.cpp's converter does to the rows of the query and key projections.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head, transformers the halves (i, i + d/2), so
    the converter interleaves each head's two halves. weight: [heads * head_dim, row]; so is the result.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if part not in heads:
        return weight
    pairs = weight.reshape(heads[part], -1, 2, weight.shape[1])  # [heads, head_dim / 2, 2, row]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


LLAMA = GgufArchitecture(name="LlamaForCausalLM", make_config=_config, restore=_restore_row_order)
