"""The matrix products of a decoder layer, and the checkpoint's matrices that each is made of. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from trioserve.models.config import DecoderConfig

__all__ = ["Product", "products"]


@attrs.frozen
class Product:
    """x W^T, where W is several matrices of a checkpoint, one above the other."""

    in_features: int
    parts: Mapping[str, int]
    """Name in the checkpoint -> rows, in the order in which they are stacked."""
    parent: str
    """Of the parts, within their layer."""


@cache
def products(config: DecoderConfig) -> Mapping[str, Product]:
    """Of each layer. To be left as it is."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
    return {
        "qkv": Product(hidden, qkv, "self_attn"),
        "output": Product(query_size, {"o_proj": hidden}, "self_attn"),
        "gate_up": Product(hidden, {"gate_proj": inner, "up_proj": inner}, "mlp"),
        "down": Product(inner, {"down_proj": hidden}, "mlp"),
    }
