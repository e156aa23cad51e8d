"""Attention over texts that lie end to end, for models of the transformers library.

It is registered there under a name that a model is loaded with, as FlashAttention is, and gets the bounds of
the texts by the same argument; so transformers makes no masks, and no row of padding is computed.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

__all__ = ["PACKED_ATTENTION", "UnsupportedAttentionError", "register"]

PACKED_ATTENTION = "trioserve_packed"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What a model may want of its attention beyond this function."""


class UnsupportedAttentionError(Exception):
    """A model's attention is not of the kind that can be computed here; the text says why."""


def register() -> None:
    """Make `PACKED_ATTENTION` known to transformers; again is fine."""
    AttentionInterface.register(PACKED_ATTENTION, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, T, head_dim]; key, value: [1, key_value_heads, T, head_dim]; cu_seq_lens_q: where the
    texts start, and the end. Returns [1, T, heads, head_dim]."""
    unknown = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if cu_seq_lens_q is None or attention_mask is not None or unknown:
        why = f"it wants {unknown[0]}" if unknown else "it keeps from its attention where texts begin"
        raise UnsupportedAttentionError(why)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    bounds = cu_seq_lens_q.tolist()
    for start, end in itertools.pairwise(bounds):
        mask = _mask(end - start, sliding_window, causal=causal)
        attended = scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[start:end] = attended[0].transpose(0, 1)
    return out[None], None


def _mask(length: int, window: int | None, *, causal: bool) -> torch.Tensor | None:
    """bool [length, length], who sees whom; None: all, or all before. window: the distance from which on
    tokens do not see each other; None: there is none."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length)[:, None] - torch.arange(length)
    near = distance.abs() < window
    return near & (distance >= 0) if causal else near
