"""The CPU engine's number formats and its vectors of sixteen floats (kernels/cpu/lanes.h), against numpy: on
each tier of processors that this machine can run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers_kernel_operations import ELEMENTS, RAGGED_SIZES, Operations, as_elements, floats, widened
from trioserve_kernels.native import available_tiers


@pytest.fixture(scope="module", params=available_tiers())
def ops(request: pytest.FixtureRequest) -> Operations:
    return Operations(request.param)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


SPECIAL = floats(
    0.0, -0.0, np.inf, -np.inf, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1e30, 1.2e-38
)


@pytest.mark.parametrize("size", RAGGED_SIZES)
def test_bf16_rounds_to_nearest_with_ties_to_even(
    ops: Operations, random: np.random.Generator, size: int
) -> None:
    values = np.concatenate((SPECIAL, random.standard_normal(size).astype(np.float32)))
    bits, back = np.full(values.size + 1, 7, np.uint16), np.full(values.size, np.nan, np.float32)
    ops("floats_to_bf16", values, values.size, bits)
    np.testing.assert_array_equal(bits[:-1], as_elements(values, "bf16"))
    assert bits[-1] == 7
    ops("bf16_to_floats", bits, values.size, back)
    np.testing.assert_array_equal(back, torch.from_numpy(values).bfloat16().float().numpy())


def test_bf16_of_nan_is_nan_and_of_a_denormal_number_small(ops: Operations) -> None:
    nan = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7FC00000], np.uint32).view(np.float32)
    values = np.concatenate((nan, floats(1e-39, -1e-39)))
    bits, back = np.zeros(values.size, np.uint16), np.zeros_like(values)
    ops("floats_to_bf16", values, values.size, bits)
    ops("bf16_to_floats", bits, values.size, back)
    assert np.isnan(back[:4]).all()
    np.testing.assert_allclose(back[4:], values[4:], atol=1.2e-38)


def test_bf16_pairs_are_split(ops: Operations, random: np.random.Generator) -> None:
    pairs = as_elements(random.standard_normal(64).astype(np.float32), "bf16")
    even, odd = np.zeros(32, np.float32), np.zeros(32, np.float32)
    ops("load_bf16_pairs", pairs, 32, even, odd)
    np.testing.assert_array_equal(even, widened(pairs[0::2]))
    np.testing.assert_array_equal(odd, widened(pairs[1::2]))


def test_every_fp16_number_is_read(ops: Operations) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    for name in ("fp16_to_floats", "load_fp16"):
        out = np.zeros(bits.size, np.float32)
        ops(name, bits, bits.size, out)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_fp16_rounds_to_nearest_with_ties_to_even(ops: Operations, random: np.random.Generator) -> None:
    each = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    each = np.sort(each[np.isfinite(each)])
    halfway = (each[1:] + each[:-1]) / 2
    around = [np.nextafter(halfway, np.float32(end)) for end in (-np.inf, np.inf)]
    odd = floats(np.inf, -np.inf, np.nan, 65519.9, 65520, 1e38, -1e38, 1e-45, 2**-25, 2**-25 * 1.001)
    wild = np.exp(random.uniform(-20, 12, 1000)).astype(np.float32)
    values = np.concatenate((each, halfway, *around, odd, wild)).astype(np.float32)
    out = np.zeros(values.size, np.uint16)
    ops("floats_to_fp16", values, values.size, out)
    np.testing.assert_array_equal(out.view(np.float16), values.astype(np.float16))


def test_bytes_are_read_and_written(ops: Operations) -> None:
    unsigned, signed = np.arange(256, dtype=np.uint8), np.arange(-128, 128, dtype=np.int8)
    out, back = np.zeros(256, np.float32), np.zeros(256, np.int8)
    ops("load_u8", unsigned, 256, out)
    np.testing.assert_array_equal(out, unsigned)
    ops("load_i8", signed, 256, out)
    np.testing.assert_array_equal(out, signed)
    ops("store_i8", out, 256, back)
    np.testing.assert_array_equal(back, signed)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "maximum", "minimum", "copysign"])
@pytest.mark.parametrize("size", [1, 16, 45])
def test_arithmetic(ops: Operations, random: np.random.Generator, name: str, size: int) -> None:
    a, b = random.standard_normal((2, size)).astype(np.float32)
    np.testing.assert_array_equal(ops.each(name, a, b), getattr(np, name)(a, b))


def test_round_and_abs(ops: Operations) -> None:
    x = floats(
        0.5, 1.5, -0.5, -2.5, 2.4999998, 0, -0.0, 8388607.5, -8388609, 1e30, np.inf, -np.inf, 4194304.5
    )
    np.testing.assert_array_equal(ops.each("round", x), np.round(x))
    np.testing.assert_array_equal(np.signbit(ops.each("abs", x)), np.zeros(x.size))
    np.testing.assert_array_equal(ops.each("abs", x), np.abs(x))


def test_order_of_lanes(ops: Operations, random: np.random.Generator) -> None:
    a, b = random.standard_normal((2, 16)).astype(np.float32)
    np.testing.assert_array_equal(ops.each("swap_halves", a), np.concatenate((a[8:], a[:8])))
    np.testing.assert_array_equal(ops.each("low_halves", a, b), np.concatenate((a[:8], b[:8])))
    np.testing.assert_array_equal(ops.each("high_halves", a, b), np.concatenate((a[8:], b[8:])))
    for below in (-1, 0, 1, 7, 8, 9, 15, 16, 99):
        out = np.zeros(16, np.float32)
        ops("select_below", below, a, b, out)
        np.testing.assert_array_equal(out, np.where(np.arange(16) < below, a, b))
    for element, dtype, _ in ELEMENTS.values():
        halves = np.full(9, 7, dtype)
        ops("store_low_half", element, a, 16, halves)
        np.testing.assert_array_equal(halves[:8], as_elements(a[:8], "bf16" if element else "fp32"))
        assert halves[8] == 7


def test_sum_and_highest(ops: Operations, random: np.random.Generator) -> None:
    for _ in range(50):
        x = random.standard_normal(16).astype(np.float32)
        assert ops("sum", x) == pytest.approx(float(x.astype(np.float64).sum()), abs=2e-6)
        assert ops("highest", x) == x.max()
    one_large = floats(*[-1e30] * 15, -1e29)
    assert ops("highest", one_large) == one_large[15]


@pytest.mark.parametrize("lane", range(16))
def test_any_reaches(ops: Operations, lane: int) -> None:
    x = np.full(16, -2, np.float32)
    x[lane] = 1.5
    below, above = (float(np.nextafter(np.float32(1.5), np.float32(end))) for end in (-np.inf, np.inf))
    reached = [bound for bound in (-np.inf, below, 1.5, above, np.inf) if ops("any_reaches", x, bound)]
    assert reached == [-np.inf, below, 1.5]
    x[lane] = np.nan
    assert ops("any_reaches", x, -2.0)
    assert not ops("any_reaches", x, -1.5)
    assert not ops("any_reaches", np.full(16, np.nan, np.float32), -np.inf)


def test_scaling_by_powers_of_two(ops: Operations) -> None:
    powers = np.arange(-320, 321, dtype=np.float32)[:640]
    for value in (1.0, -1.75, 0.0):
        x = np.full(powers.size, value, np.float32)
        out = np.zeros_like(x)
        ops("scale_by_power_of_two", x, powers, x.size, out)
        with np.errstate(over="ignore", under="ignore"):
            np.testing.assert_array_equal(out, np.ldexp(x, powers.astype(np.int32)))


EXPONENTIALS = {"exp": (-87.3, 88.7), "exp2": (-125.9, 127.9), "tanh": (-12.0, 12.0)}


@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials_are_right_to_the_last_bits(ops: Operations, name: str) -> None:
    x = np.linspace(*EXPONENTIALS[name], 200_001, dtype=np.float32)
    np.testing.assert_allclose(ops.each(name, x), getattr(np, name)(x.astype(np.float64)), rtol=2e-7)
    small = np.geomspace(1e-30, 1, 10_001, dtype=np.float32)
    for x in (small, -small):
        np.testing.assert_allclose(ops.each(name, x), getattr(np, name)(x.astype(np.float64)), rtol=2e-7)


def test_powers_of_two_of_scores(ops: Operations) -> None:
    """Of numbers that are not above 0, as they are behind the highest score's subtraction."""
    x = np.concatenate([-np.logspace(-8, np.log10(120), 1000), np.zeros(8)]).astype(np.float32)
    np.testing.assert_allclose(ops.each("exp2_upto_0", x), np.exp2(x.astype(np.float64)), rtol=3e-7)
    far_out = np.array([-200, -1e30, np.nan] + [0] * 13, np.float32)
    np.testing.assert_array_equal(ops.each("exp2_upto_0", far_out)[:2], 0)
    assert np.isnan(ops.each("exp2_upto_0", far_out)[2])


def test_coarse_functions(ops: Operations) -> None:
    x = np.linspace(-80, 80, 100_001, dtype=np.float32)
    np.testing.assert_allclose(ops.each("exp_coarse", x), np.exp(x.astype(np.float64)), rtol=1e-4)
    x = np.concatenate((np.geomspace(1e-30, 1e30, 100_001, dtype=np.float32), floats(np.inf)))
    np.testing.assert_allclose(ops.each("reciprocal_coarse", x), 1 / x.astype(np.float64), rtol=1e-4)
    far_out = floats(-np.inf, -1e30, -200, 200, 1e30, np.inf, np.nan)
    np.testing.assert_array_equal(ops.each("exp_coarse", far_out), [0, 0, 0, np.inf, np.inf, np.inf, np.nan])


def test_exponentials_beyond_their_range(ops: Operations) -> None:
    very_negative = floats(-200, -1e30, -3e38, -np.inf)
    for name in ("exp", "exp2"):
        np.testing.assert_array_equal(ops.each(name, very_negative), np.zeros(4))
        np.testing.assert_array_equal(ops.each(name, floats(129, 1e30, np.inf)), np.full(3, np.inf))
        np.testing.assert_array_equal(ops.each(name, floats(0, -0.0)), np.ones(2))
    np.testing.assert_array_equal(
        ops.each("exp2", np.arange(-126, 128, dtype=np.float32)), np.exp2(np.arange(-126, 128))
    )
    np.testing.assert_array_equal(ops.each("tanh", floats(-np.inf, -1e30, 50, np.inf)), [-1, -1, 1, 1])
    for name in EXPONENTIALS:
        assert np.isnan(ops.each(name, floats(np.nan))[0])
