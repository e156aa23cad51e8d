"""What a GGUF architecture is in Hugging Face terms: config.json, tensor names, and how weights were changed.

Names and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources.gguf_header import GgufHeader
from trioserve.model_sources.gguf_metadata import decimal, number

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LAYER_WEIGHTS", "GgufArchitecture", "Restore", "shared_config"]

LAYER_WEIGHTS = {
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
"""A layer's weights, GGUF -> Hugging Face, as most architectures have them."""

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class Restore(Protocol):
    """Gives a tensor as it was before llama.cpp's converter.

    part: the tensor's name within its layer, without `.weight`; weight: a vector in float32, or the rows of a
    matrix, which may be the bytes of blocks: rows may change places, and no more. config: config.json. The
    result has the same shape and type.
    """

    def __call__(self, part: str, weight: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]: ...


def _unchanged(part: str, weight: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    return weight


@attrs.frozen(kw_only=True)
class GgufArchitecture:
    """One architecture. Its functions get files of this architecture only."""

    name: str
    """In config.json's `architectures`."""
    make_config: Callable[[GgufHeader], dict[str, Any]]
    """Of config.json, all but `architectures`, `rope_scaling`, dtype and token ids.

    Raises:
      ModelSourceError: a value is missing.
      ModelNotSupportedError: a value is of the wrong type, or asks for something that we do not compute.
    """
    layer_weights: Mapping[str, str] = LAYER_WEIGHTS
    layer_biases: Mapping[str, str] = attrs.Factory(dict)
    restore: Restore = _unchanged
    end_tokens: tuple[str, ...] = ()
    """After these there is nothing to say, whether the file names them or not."""

    def hugging_face_name(self, name: str) -> str:
        """A tensor's name in the Hugging Face layout.

        Raises:
          ModelNotSupportedError: the architecture has no such tensor (a bias, an expert, ...).
        """
        if name in _WHOLE:
            return _WHOLE[name]
        match = _LAYER.fullmatch(name)
        if match is not None:
            index, part, kind = match.groups()
            names = self.layer_weights if kind == "weight" else self.layer_biases
            if part in names:
                return f"model.layers.{index}.{names[part]}.{kind}"
        raise ModelNotSupportedError(
            f"The file has the tensor {name}, which a plain {self.name} has not: "
            "this variant is not supported."
        )

    def restored(self, name: str, weight: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
        """The file's tensor `name` as it was before llama.cpp's converter. config: config.json."""
        match = _LAYER.fullmatch(name)
        return self.restore(name.removesuffix(".weight") if match is None else match[2], weight, config)


def shared_config(header: GgufHeader) -> dict[str, Any]:
    """The part of config.json that all decoders have. Raises as `GgufArchitecture.make_config`."""
    if number(header, "expert_count", int, default=0):
        raise ModelNotSupportedError("The file is a mixture of experts, which is not supported.")
    hidden_size = number(header, "embedding_length", int)
    heads = number(header, "attention.head_count", int)
    head_dim = number(header, "attention.key_length", int, default=hidden_size // heads)
    if number(header, "rope.dimension_count", int, default=head_dim) != head_dim:
        raise ModelNotSupportedError("The file rotates a part of each head only, which is not supported.")
    return {
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden_size,
        "intermediate_size": number(header, "feed_forward_length", int),
        "num_hidden_layers": number(header, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": number(header, "attention.head_count_kv", int, default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": number(header, "context_length", int),
        "rms_norm_eps": decimal(header, "attention.layer_norm_rms_epsilon"),
        "rope_theta": decimal(header, "rope.freq_base", default=10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _vocab_size(header: GgufHeader) -> int:
    """The rows of the embedding, which may be more than the tokens."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelSourceError("The file has no embedding (token_embd.weight).")
    return embedding.shape[0]
