"""The shape of a decoder model, as the shared layers need to know it. Imports no torch."""

from __future__ import annotations

from typing import Literal

import attrs

__all__ = ["Activation", "DecoderConfig", "LayerConfig", "RotaryConfig"]

Activation = Literal["silu", "gelu_tanh"]
"""gelu_tanh: GELU with the tanh approximation."""


@attrs.frozen(kw_only=True)
class RotaryConfig:
    """How positions turn into angles; the formulas are in `trioserve.models.rotary`."""

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    """Of linear and llama3: how many times longer than the original context the model reaches."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@attrs.frozen(kw_only=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None
    """How many tokens the layer sees, the newest included; None: all."""
    rotary: RotaryConfig


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """All that the shared decoder layers need to know.

    Invariants: every size is positive, num_heads is a multiple of num_kv_heads, head_dim is even.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    """The output matrix is the embedding matrix."""
    attention_scale: float
    """Of query times key, before the softmax."""
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    query_key_norm: bool = False
    """Each query and key head is normed before the rotation."""
    post_norms: bool = False
    """What attention and MLP give is normed too, before it is added."""
    norm_offset: float = 0.0
    """Added to the stored weights of all norms."""
    embedding_scale: float = 1.0
    """Rounded to the model's dtype before it is applied."""
    logit_softcap: float | None = None
    """c: logits become c tanh(logits / c)."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)
