"""The attention part of a decoder layer, around the worker's attention over the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import trioserve_kernels.reference as kernels
from trioserve.models.layers import Linear
from trioserve.models.products import products

if TYPE_CHECKING:
    from trioserve.models.config import DecoderConfig
    from trioserve.models.decoder import AdapterContext, AttentionContext

__all__ = ["Attention", "Rotation"]

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of the step's positions (`trioserve_kernels.reference.rotary_tables`)."""


class Attention:
    """Queries, keys and values in one product; their norms, if any; rotary positions; the worker's attention;
    a projection."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        self._layer = layer
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        qkv, output = products(config)["qkv"], products(config)["output"]
        self.qkv = Linear(qkv.in_features, qkv.parts, bias=config.qkv_bias, dtype=dtype)
        self.norm = _HeadNorm(config, dtype) if config.query_key_norm else None
        self.output = Linear(output.in_features, output.parts, bias=config.output_bias, dtype=dtype)

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        norm = {} if self.norm is None else self.norm.weights(prefix)
        return self.qkv.weights(prefix) | norm | self.output.weights(prefix)

    def pack(self) -> None:
        self.qkv.pack()
        self.output.pack()
        if self.norm is not None:
            self.norm.pack()

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        adapters: AdapterContext | None,
    ) -> torch.Tensor:
        num_heads, num_kv_heads, _ = self._heads
        projected = self.qkv(x)
        if adapters is not None:
            adapters.add(self._layer, "qkv", x, projected)
        heads = projected.view(len(x), sum(self._heads), self._head_dim)
        turning, value = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if self.norm is not None:
            turning = self.norm(turning)
        turned = kernels.apply_rotary(turning, *rotation)
        query, key = turned[:, :num_heads], turned[:, num_heads:]
        attended = context.attend(self._layer, query, key, value, kv_cache).flatten(1)
        output = self.output(attended)
        if adapters is not None:
            adapters.add(self._layer, "output", attended, output)
        return output


class _HeadNorm:
    """Two RMSNorms over head_dim, one for all query heads and one for all key heads, in one call."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._repeats = torch.tensor([config.num_heads, config.num_kv_heads])
        self._weights = torch.empty(2, config.head_dim, dtype=dtype)
        self._scale = torch.empty(0)
        """Once packed: fp32 [query heads + key heads, head_dim]."""
        self._epsilon = config.rms_norm_eps
        self._offset = config.norm_offset

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        query, key = self._weights
        return {f"{prefix}q_norm.weight": query, f"{prefix}k_norm.weight": key}

    def pack(self) -> None:
        self._scale = (self._weights.float() + self._offset).repeat_interleave(self._repeats, dim=0)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """[T, query heads + key heads, head_dim] -> the same."""
        return kernels.rms_norm(heads, self._scale, self._epsilon)
