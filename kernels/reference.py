"""What each kernel computes, in plain torch: the definition every other implementation is tested against.

Shapes: T tokens of all sequences of a step laid end to end, H query heads, K key-value heads (H = K * G),
D numbers per head. A slot is one token's place in the paged cache: block * block_size + offset.
"""

from __future__ import annotations

import torch

__all__ = [
    "apply_rotary",
    "gelu_tanh_and_mul",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_tables",
    "silu_and_mul",
]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, in fp32, rounded once to x's dtype.

    x: [..., N]; weight: [N], or a weight for each of x's last axes.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight.float()).to(x.dtype)


def rotary_tables(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of the angles position * frequency, for `apply_rotary`.

    positions: [T], any integer dtype; frequencies: [D/2] fp32, in radians per token.
    Both results are fp32 [T, 1, D]: cosines (c, c), sines (-s, s).
    """
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its angle (the "neox" pairing), in fp32, rounded to x's dtype.

    With x = (a, b) in halves, c and s of `rotary_tables`: (a c - b s, b c + a s), which is
    x * (c, c) + (b, a) * (-s, s).

    x: [T, heads, D].
    """
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    gate_up: [..., 2 N], gate first. Returns [..., N].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).

    gate_up: [..., 2 N], gate first. Returns [..., N].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """cache[slots[t]] = key[t] (and value alike), converted to the cache's dtype.

    key, value: [T, K, D]; caches: [num_blocks, block_size, K, D], contiguous; slots: int64 [T], distinct.
    """
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    sequence_lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal grouped-query attention of each sequence's newest tokens over its pages.

    The queries of sequence b are rows [query_starts[b], query_starts[b + 1]) and its last positions, so that
    row i of n sits at position p = sequence_lengths[b] - n + i. Of query head h (key-value head h // G):

        softmax over p - window < j <= p of (q . k_j * scale), times v_j, summed in fp32 and rounded to
        query's dtype; window None: over all j <= p

    query: [T, H, D]; caches: [num_blocks, block_size, K, D]; block_tables: [B, max_blocks], -1 where no
    query sees the page; query_starts: [B + 1]; sequence_lengths: [B], all integers. Returns [T, H, D].
    """
    output = torch.empty_like(query)
    for b, length in enumerate(sequence_lengths.tolist()):
        rows = slice(int(query_starts[b]), int(query_starts[b + 1]))
        first_query = length - (rows.stop - rows.start)
        first_key = 0 if window is None else max(0, first_query - window + 1)
        seen = slice(first_key, length)
        keys = _tokens(key_cache, block_tables[b], seen)
        values = _tokens(value_cache, block_tables[b], seen)
        output[rows] = _attend(query[rows], keys, values, scale, window)
    return output


def _tokens(cache: torch.Tensor, blocks: torch.Tensor, positions: slice) -> torch.Tensor:
    """The tokens at some positions of a sequence, fp32 [positions, K, D]."""
    first_page = positions.start // cache.shape[1]
    used = blocks[first_page : -(-positions.stop // cache.shape[1])]
    skip = first_page * cache.shape[1]
    return cache[used].flatten(0, 1)[positions.start - skip : positions.stop - skip].float()


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    num_new, num_heads, _ = query.shape
    length, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    own = torch.arange(length - num_new, length, device=query.device)[:, None]
    other = torch.arange(length, device=query.device)
    hidden = other > own if window is None else (other > own) | (other <= own - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
