"""The Llama family: pre-norm blocks of rotary grouped-query attention and a gated MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import trioserve_kernels.reference as kernels
from trioserve.models.config import DecoderConfig, llama_config
from trioserve.models.layers import Embedding, Linear, RMSNorm
from trioserve.models.rotary import rotary_frequencies

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trioserve.models.decoder import AttentionContext

__all__ = ["LlamaForCausalLM"]

_Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of the step's positions, the same for all layers."""


class Attention:
    """Queries, keys and values in one product; rotary positions; the worker's attention; a projection."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        query_size, kv_size, _ = (count * config.head_dim for count in self._heads)
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
            dtype=dtype,
        )
        self.output = Linear(query_size, {"o_proj": config.hidden_size}, bias=config.output_bias, dtype=dtype)

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        return self.qkv.weights(prefix) | self.output.weights(prefix)

    def __call__(
        self, x: torch.Tensor, rotation: _Rotation, context: AttentionContext, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        num_heads, num_kv_heads, _ = self._heads
        heads = self.qkv(x).view(len(x), sum(self._heads), self._head_dim)
        turned = kernels.apply_rotary(heads[:, : num_heads + num_kv_heads], *rotation)
        query, key = turned[:, :num_heads], turned[:, num_heads:]
        attended = context.attend(query, key, heads[:, num_heads + num_kv_heads :], kv_cache)
        return self.output(attended.flatten(1))


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias, dtype=dtype
        )
        self.down = Linear(inner, {"down_proj": hidden}, bias=config.mlp_bias, dtype=dtype)

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        return self.gate_up.weights(prefix) | self.down.weights(prefix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(kernels.silu_and_mul(self.gate_up(x)))


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype)

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            **self.attention_norm.weights(f"{prefix}input_layernorm."),
            **self.attention.weights(f"{prefix}self_attn."),
            **self.mlp_norm.weights(f"{prefix}post_attention_layernorm."),
            **self.mlp.weights(f"{prefix}mlp."),
        }

    def linears(self) -> Iterator[Linear]:
        yield from (self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down)

    def __call__(
        self, x: torch.Tensor, rotation: _Rotation, context: AttentionContext, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, context, kv_cache)
        return x + self.mlp(self.mlp_norm(x))


class LlamaForCausalLM:
    """See `trioserve.models.decoder.DecoderModel`."""

    def __init__(self, raw_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.config = config = llama_config(raw_config)
        self.dtype = dtype
        self._embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self._blocks = [Block(config, dtype) for _ in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if config.tie_word_embeddings:
            self._head = Linear.tied(self._embedding.weight)
        else:
            self._head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, bias=False, dtype=dtype)
        self._frequencies = rotary_frequencies(config.rotary, config.head_dim)

    def weights(self) -> dict[str, torch.Tensor]:
        found = self._embedding.weights("model.embed_tokens.") | self._norm.weights("model.norm.")
        for index, block in enumerate(self._blocks):
            found |= block.weights(f"model.layers.{index}.")
        return found | self._head.weights("")

    def is_redundant(self, name: str) -> bool:
        """Old checkpoints store the rotary frequencies; some store a tied output matrix once more."""
        return name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.config.tie_word_embeddings
        )

    def pack(self) -> None:
        for block in self._blocks:
            for linear in block.linears():
                linear.pack()
        self._head.pack()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        kv_caches: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        rotation = kernels.rotary_tables(positions, self._frequencies)
        x = self._embedding(token_ids)
        for block, kv_cache in zip(self._blocks, kv_caches, strict=True):
            x = block(x, rotation, attention, kv_cache)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)
