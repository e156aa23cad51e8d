"""The kernels' definitions, against numpy in float64 and against formulas worked out one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trioserve_kernels.reference import (
    apply_rotary,
    gelu_tanh_and_mul,
    paged_attention,
    reshape_and_cache,
    rms_norm,
    rotary_tables,
    silu_and_mul,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_rms_norm_is_computed_wide_and_rounded_once() -> None:
    x, weight = (torch.randn(5, 33) * 7).bfloat16(), torch.randn(33).bfloat16()
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * weight.double().numpy()
    result = rms_norm(x, weight, 1e-3)
    assert result.dtype is torch.bfloat16
    # Half a unit in the last of bfloat16's 8 bits, and a hair for fp32's own rounding.
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=2**-8 * 1.001, atol=0)


def test_rms_norm_takes_a_weight_for_each_of_several_axes() -> None:
    x, weight = torch.randn(5, 3, 4), torch.randn(3, 4)
    expected = torch.stack([rms_norm(x[:, i], weight[i], 1e-6) for i in range(3)], 1)
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)


def test_rotary_turns_pairs_as_complex_numbers() -> None:
    positions = torch.tensor([0, 1, 17, 4000])
    frequencies = torch.tensor([1.0, 0.3, 0.01])
    x = torch.randn(4, 2, 6)
    result = apply_rotary(x, *rotary_tables(positions, frequencies)).numpy()
    pairs = x[..., :3].double().numpy() + 1j * x[..., 3:].double().numpy()
    angles = positions.numpy()[:, None] * frequencies.double().numpy()
    turned = pairs * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(result, np.concatenate((turned.real, turned.imag), -1), atol=5e-4)


def test_silu_and_mul() -> None:
    gate_up = torch.tensor([[0.0, -2.0, 3.0, 5.0, 7.0, -1.0]])
    expected = [0.0, -2.0 / (1 + math.exp(2)) * 7, -3.0 / (1 + math.exp(-3))]
    torch.testing.assert_close(silu_and_mul(gate_up), torch.tensor([expected]))


def test_gelu_tanh_and_mul() -> None:
    gate_up = torch.tensor([[0.0, -2.0, 3.0, 5.0, 7.0, -1.0]])

    def gelu(x: float) -> float:
        return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    torch.testing.assert_close(gelu_tanh_and_mul(gate_up), torch.tensor([[0.0, gelu(-2) * 7, -gelu(3)]]))


def test_reshape_and_cache_writes_its_slots_and_nothing_else() -> None:
    key_cache, value_cache = torch.zeros(3, 4, 2, 5).bfloat16(), torch.zeros(3, 4, 2, 5).bfloat16()
    key, value = torch.randn(2, 2, 5), torch.randn(2, 2, 5)
    reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([9, 2]))
    assert torch.equal(key_cache[2, 1], key[0].bfloat16())
    assert torch.equal(value_cache[0, 2], value[1].bfloat16())
    key_cache[2, 1] = key_cache[0, 2] = value_cache[2, 1] = value_cache[0, 2] = 0
    assert not key_cache.any()
    assert not value_cache.any()


def _attend_one(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    scores = keys @ query * scale
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_paged_attention_follows_block_tables_and_is_causal(window: int | None) -> None:
    num_heads, num_kv_heads, head_dim, block_size = 6, 2, 8, 4
    key_cache, value_cache = torch.randn(2, 9, block_size, num_kv_heads, head_dim)
    block_tables = torch.tensor([[7, 2, 0], [5, 8, 1]])
    lengths, num_new = [6, 11], [1, 4]
    query = torch.randn(sum(num_new), num_heads, head_dim)
    result = paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables=block_tables,
        query_starts=torch.tensor([0, 1, 5]),
        sequence_lengths=torch.tensor(lengths),
        scale=0.3,
        window=window,
    )
    rows = [
        (b, length - n + i)
        for b, (length, n) in enumerate(zip(lengths, num_new, strict=True))
        for i in range(n)
    ]
    for row, (b, position) in enumerate(rows):
        first = 0 if window is None else max(0, position - window + 1)
        seen = range(first, position + 1)
        slots = [block_tables[b, p // block_size] * block_size + p % block_size for p in seen]
        for head in range(num_heads):
            keys, values = (
                cache.flatten(0, 1)[slots, head // 3].double().numpy() for cache in (key_cache, value_cache)
            )
            expected = _attend_one(query[row, head].double().numpy(), keys, values, 0.3)
            np.testing.assert_allclose(result[row, head].numpy(), expected, atol=1e-5)
