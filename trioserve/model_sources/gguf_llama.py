"""What GGUF's `llama` architecture is in Hugging Face terms: config.json, tensor names, and row order.

Names and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, TypeVar

from trioserve.errors import ModelNotSupportedError, ModelSourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from trioserve.model_sources.gguf_header import GgufHeader

__all__ = [
    "ROPE_FACTORS",
    "hugging_face_architecture",
    "hugging_face_name",
    "llama_config",
    "restore_row_order",
]

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: one divisor for each rotary frequency, from which the config's rope_scaling is told."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")

Number = TypeVar("Number", int, float)


def hugging_face_architecture(header: GgufHeader, *, where: str) -> str:
    """The name in config.json's `architectures`.

    Raises:
      ModelNotSupportedError: this GGUF architecture cannot be converted.
    """
    try:
        return _ARCHITECTURES[header.architecture]
    except KeyError:
        raise ModelNotSupportedError(
            f"{where} has the GGUF architecture {header.architecture!r}, which is not supported. "
            f"Supported in .gguf files are: {', '.join(sorted(_ARCHITECTURES))}."
        ) from None


def hugging_face_name(name: str) -> str:
    """A tensor's name in the Hugging Face layout.

    Raises:
      ModelNotSupportedError: a llama has no such tensor (a bias, an expert, ...).
    """
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelNotSupportedError(
            f"The file has the tensor {name}, which a plain llama has not: this variant is not supported."
        )
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def restore_row_order(
    name: str, weight: NDArray[np.float32], config: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Undo what llama.cpp's converter does to the rows of the query and key projections.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head, transformers the halves (i, i + d/2), so
    the converter interleaves each head's two halves. weight: [heads * head_dim, hidden]; so is the result.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in heads:
        return weight
    pairs = weight.reshape(heads[match[2]], -1, 2, weight.shape[1])  # [heads, head_dim / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def llama_config(header: GgufHeader) -> dict[str, Any]:
    """config.json for the file's model, without dtype and token ids.

    Raises:
      ModelSourceError: a value is missing or of the wrong type.
      ModelNotSupportedError: the file asks for something that we do not compute.
    """
    _refuse_variants(header)
    hidden_size = _value(header, "embedding_length", int)
    heads = _value(header, "attention.head_count", int)
    head_dim = _value(header, "attention.key_length", int, default=hidden_size // heads)
    if _value(header, "rope.dimension_count", int, default=head_dim) != head_dim:
        raise ModelNotSupportedError("The file rotates a part of each head only, which is not supported.")
    return {
        "architectures": [_ARCHITECTURES["llama"]],
        "model_type": "llama",
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden_size,
        "intermediate_size": _value(header, "feed_forward_length", int),
        "num_hidden_layers": _value(header, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(header, "attention.head_count_kv", int, default=heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _value(header, "context_length", int),
        "rms_norm_eps": _shortest(_value(header, "attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(_value(header, "rope.freq_base", float, default=10000.0)),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _refuse_variants(header: GgufHeader) -> None:
    if _value(header, "expert_count", int, default=0):
        raise ModelNotSupportedError("The file is a mixture of experts, which is not supported.")


def _vocab_size(header: GgufHeader) -> int:
    """The rows of the embedding, which may be more than the tokens."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelSourceError("The file has no embedding (token_embd.weight).")
    return embedding.shape[0]


def _value(header: GgufHeader, key: str, kind: type[Number], *, default: Number | None = None) -> Number:
    found = header.metadata.get(f"{header.architecture}.{key}", default)
    if found is None:
        raise ModelSourceError(f"The file's metadata has no {header.architecture}.{key}.")
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ModelNotSupportedError(
            f"The file's {header.architecture}.{key} is {found!r:.80}; one number for all is supported."
        )
    return found


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: what 1e-05 was before it was stored in one."""
    stored = struct.pack("<f", value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(short for short in candidates if struct.pack("<f", short) == stored)
