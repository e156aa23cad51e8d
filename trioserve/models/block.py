"""A decoder layer: attention and MLP, each added to what comes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.models.attention import Attention
from trioserve.models.checkpoint_names import norm_names
from trioserve.models.layers import RMSNorm
from trioserve.models.mlp import GatedMLP

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from trioserve.models.attention import Rotation
    from trioserve.models.config import DecoderConfig
    from trioserve.models.decoder import AdapterContext, AttentionContext

__all__ = ["Block"]


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x)); with post-norms, what is added is normed too."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        self._attention = Attention(config, layer, dtype)
        self._mlp = GatedMLP(config, layer, dtype)
        self._norm_names = norm_names(config)
        self._norms = _norms(config, self._norm_names, dtype)

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        found = self._attention.weights(f"{prefix}self_attn.") | self._mlp.weights(f"{prefix}mlp.")
        for place, norm in self._norms.items():
            found |= norm.weights(f"{prefix}{self._norm_names[place]}.")
        return found

    def pack(self) -> None:
        self._attention.pack()
        self._mlp.pack()
        for norm in self._norms.values():
            norm.pack()

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        adapters: AdapterContext | None,
    ) -> torch.Tensor:
        attended = self._attention(self._norm("attention", x), rotation, context, kv_cache, adapters)
        x = x + self._norm("attention_output", attended)
        return x + self._norm("mlp_output", self._mlp(self._norm("mlp", x), adapters))

    def _norm(self, place: str, x: torch.Tensor) -> torch.Tensor:
        norm = self._norms.get(place)
        return x if norm is None else norm(x)


def _norms(config: DecoderConfig, places: Mapping[str, str], dtype: torch.dtype) -> dict[str, RMSNorm]:
    return {
        place: RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset, dtype=dtype)
        for place in places
    }
