"""What a decoder's tensors are called in checkpoints. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.models.products import products

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trioserve.models.config import DecoderConfig

__all__ = ["is_redundant", "norm_names", "tensor_names"]

_PRE_NORMS = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
_PRE_AND_POST_NORMS = {
    "attention": "input_layernorm",
    "attention_output": "post_attention_layernorm",
    "mlp": "pre_feedforward_layernorm",
    "mlp_output": "post_feedforward_layernorm",
}
"""Checkpoints' names; `post_attention_layernorm` is not the same norm in both."""


def norm_names(config: DecoderConfig) -> Mapping[str, str]:
    """Place of a norm over the hidden size in a layer -> its name in checkpoints."""
    return _PRE_AND_POST_NORMS if config.post_norms else _PRE_NORMS


def tensor_names(config: DecoderConfig) -> Iterator[str]:
    """Of all that a checkpoint must hold."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not config.tie_word_embeddings:
        yield "lm_head.weight"
    for layer in range(config.num_layers):
        for name in _names_in_layer(config):
            yield f"model.layers.{layer}.{name}"


def _names_in_layer(config: DecoderConfig) -> Iterator[str]:
    yield from (f"{name}.weight" for name in norm_names(config).values())
    if config.query_key_norm:
        yield from ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    has_bias = {"qkv": config.qkv_bias, "output": config.output_bias}
    for key, product in products(config).items():
        for part in product.parts:
            yield f"{product.parent}.{part}.weight"
            if has_bias.get(key, config.mlp_bias):
                yield f"{product.parent}.{part}.bias"


def is_redundant(config: DecoderConfig, name: str) -> bool:
    """Old checkpoints store the rotary frequencies; some store a tied output matrix once more."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
