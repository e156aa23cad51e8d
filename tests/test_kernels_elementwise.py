"""What the CPU engine does between products, against numpy in float64: on each tier of processors that this
machine can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from helpers_kernel_operations import ELEMENTS, FP32, RAGGED_SIZES, Operations, as_elements, floats, widened
from trioserve_kernels.native import available_tiers
from trioserve_kernels.reference import apply_rotary, rotary_tables

if TYPE_CHECKING:
    from numpy.typing import NDArray


@pytest.fixture(scope="module", params=available_tiers())
def ops(request: pytest.FixtureRequest) -> Operations:
    return Operations(request.param)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(x / (1 + np.exp(-x)), np.float64)


def gelu_tanh(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), np.float64)


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}
GATED = {"fp32": 4e-7, "bf16": 2**-8 * 1.1}
"""How far off, relative: bf16's by rounding, and a tenth of that."""


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_gated_activation(ops: Operations, random: np.random.Generator, name: str, element: str) -> None:
    number, dtype, _ = ELEMENTS[element]
    gate_up = (random.standard_normal((100, 2, 8)) * 4).astype(np.float32)
    out = np.full((101, 8), 7, dtype)
    ops("gated", list(ACTIVATIONS).index(name), number, gate_up, 100, out)
    gate, up = gate_up.astype(np.float64).swapaxes(0, 1)
    np.testing.assert_allclose(
        widened(out[:100]), ACTIVATIONS[name](gate) * up, rtol=GATED[element], atol=3e-7
    )
    assert (out[100] == 7).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_two_panels_are_gated_as_one(
    ops: Operations, random: np.random.Generator, name: str, element: str
) -> None:
    number, dtype, _ = ELEMENTS[element]
    gate_up = (random.standard_normal((2, 16)) * 4).astype(np.float32)
    one_by_one, together = np.zeros((2, 16), dtype)
    ops("gated", list(ACTIVATIONS).index(name), number, gate_up, 2, one_by_one)
    ops("gated_pair", list(ACTIVATIONS).index(name), number, gate_up, together)
    np.testing.assert_array_equal(together, one_by_one)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_activations_far_out(ops: Operations, name: str, element: str) -> None:
    number, dtype, _ = ELEMENTS[element]
    gates = floats(-1e30, -100, -50, 0, -0.0, 100, 1e30, np.nan)
    out = np.zeros(8, dtype)
    ops(
        "gated",
        list(ACTIVATIONS).index(name),
        number,
        np.concatenate((gates, np.ones(8, np.float32))),
        1,
        out,
    )
    expected = [0, 0, 0, 0, 0, 100, 1e30, np.nan]
    np.testing.assert_allclose(widened(out), expected, rtol=GATED[element], atol=1e-18)


@pytest.mark.parametrize("element", ELEMENTS)
def test_rms_norm(ops: Operations, random: np.random.Generator, element: str) -> None:
    number, dtype, rtol = ELEMENTS[element]
    for size in RAGGED_SIZES:
        x = (random.standard_normal((3, size)) * [[1e-3], [1.0], [1e4]]).astype(np.float32)
        weight = random.standard_normal(size).astype(np.float32)
        out = np.full(3 * size + 1, 7, dtype)
        ops("rms_norm", number, x, weight, 1e-5, 3, size, out)
        normed, expected = widened(out[:-1]).reshape(3, size), rms_norm(x, weight, 1e-5)
        np.testing.assert_allclose(normed, expected, rtol=rtol * 1.5, err_msg=f"{size=}")
        assert out[-1] == 7


@pytest.mark.parametrize("element", ELEMENTS)
def test_norms_that_are_added(ops: Operations, random: np.random.Generator, element: str) -> None:
    for size in RAGGED_SIZES:
        x = as_elements(random.standard_normal(size).astype(np.float32), element)
        total, weight = random.standard_normal((2, size)).astype(np.float32)
        expected = total + rms_norm(x, weight, 1e-6)
        ops("add_rms_norm", ELEMENTS[element][0], total, x, weight, 1e-6, size)
        np.testing.assert_allclose(total, expected, atol=1e-6, err_msg=f"{size=}")


@pytest.mark.parametrize("element", ELEMENTS)
def test_norms_of_heads(ops: Operations, random: np.random.Generator, element: str) -> None:
    number, _, rtol = ELEMENTS[element]
    for head_dim in (16, 24, 64, 80, 96, 256):
        heads = as_elements(random.standard_normal((3, head_dim)).astype(np.float32), element)
        weight = random.standard_normal(head_dim).astype(np.float32)
        expected = rms_norm(heads, weight, 1e-6)
        ops("rms_norm_heads", number, heads, 3, head_dim, weight, 1e-6)
        np.testing.assert_allclose(widened(heads), expected, rtol=rtol * 1.5, err_msg=f"{head_dim=}")


def rms_norm(x: NDArray[np.generic], weight: NDArray[np.float32], epsilon: float) -> NDArray[np.float64]:
    wide = widened(x)
    return np.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * weight, np.float64)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("element", ELEMENTS)
def test_rotary(ops: Operations, random: np.random.Generator, head_dim: int, element: str) -> None:
    number, _, rtol = ELEMENTS[element]
    frequencies = (10_000.0 ** -np.linspace(0, 1, head_dim // 2)).astype(np.float32)
    for position in (0, 1, 255, 256, 5000):
        heads = as_elements(random.standard_normal((3, head_dim)).astype(np.float32), element)
        expected = rotated(heads, np.float32(position) * frequencies)
        ops("rotate_heads", number, heads, 3, head_dim, frequencies, position)
        np.testing.assert_allclose(widened(heads), expected, rtol=rtol, atol=1e-6, err_msg=f"{position=}")


def rotated(heads: NDArray[np.generic], angles: NDArray[np.float32]) -> NDArray[np.float64]:
    """Pairs as complex numbers. The angles are floats: they are what the models' definition rounds to."""
    wide = widened(heads)
    half = wide.shape[-1] // 2
    pairs = (wide[:, :half] + 1j * wide[:, half:]) * np.exp(1j * angles.astype(np.float64))
    return np.concatenate((pairs.real, pairs.imag), -1)


def test_rotary_is_that_of_the_torch_path(ops: Operations) -> None:
    frequencies = torch.from_numpy((10_000.0 ** -np.linspace(0, 1, 32)).astype(np.float32))
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    expected = apply_rotary(x, *rotary_tables(torch.tensor([1234]), frequencies))
    heads = x.numpy().copy()
    ops("rotate_heads", FP32, heads, 3, 64, frequencies.numpy(), 1234)
    np.testing.assert_allclose(heads, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("element", ELEMENTS)
def test_rows_are_scaled_and_added(ops: Operations, random: np.random.Generator, element: str) -> None:
    number, _, rtol = ELEMENTS[element]
    for size in RAGGED_SIZES:
        x, total = random.standard_normal((2, size)).astype(np.float32)
        expected = total + 5.5 * x.astype(np.float64)
        ops("add_scaled_row", number, total, x, 5.5, size)
        tolerance = 1e-6 + rtol * np.abs(5.5 * x).max()
        np.testing.assert_allclose(total, expected, atol=tolerance, err_msg=f"{size=}")


FORMATS = {"f32": 0, "bf16": 1, "q8": 2, "q8_16": 3, "q4": 4, "q4_wide": 5}
NATIVE_BF16 = {"avx512_bf16", "amx"}
INT8 = {"avx512", "avx512_bf16", "amx"}


def expected_form(tier: str, format_name: str) -> str:
    if format_name == "f32":
        return "f32"
    if format_name == "bf16" and tier in NATIVE_BF16:
        return "bf16"
    return "int8" if format_name != "bf16" and tier in INT8 else "f32"


class OperandRows:
    """The rows of x as a product takes them."""

    def __init__(self, ops: Operations, format_name: str, x: NDArray[np.float32]) -> None:
        rows, columns = x.shape
        padded = -(-columns // 32) * 32
        self.f32 = np.full((rows, padded), np.nan, np.float32)
        self.bf16 = np.full((rows, padded), 7, np.uint16)
        self.int8 = np.full((rows, padded), 7, np.int8)
        self.scales, self.sums = (
            np.zeros((rows, padded // 32), np.float32),
            np.zeros((rows, padded // 32), np.int32),
        )
        out = (self.f32, self.bf16, self.int8, self.scales, self.sums)
        form = ops("operand", FORMATS[format_name], x, rows, columns, *out)
        self.form = ("f32", "bf16", "int8")[int(form)]


@pytest.mark.parametrize("format_name", FORMATS)
def test_operand(ops: Operations, random: np.random.Generator, format_name: str) -> None:
    for columns in (2, 30, 32, 34, 48, 576):
        x = random.standard_normal((3, columns)).astype(np.float32)
        operand = OperandRows(ops, format_name, x)
        assert operand.form == expected_form(ops.tier, format_name)
        padded = np.pad(x, ((0, 0), (0, operand.f32.shape[1] - columns)))
        if operand.form == "f32":
            np.testing.assert_array_equal(operand.f32, padded)
        elif operand.form == "bf16":
            np.testing.assert_array_equal(operand.bf16, as_elements(padded, "bf16"))
        else:
            assert_quantized(operand, padded)


def assert_quantized(operand: OperandRows, x: NDArray[np.float32]) -> None:
    groups = x.reshape(3, -1, 32).astype(np.float64)
    quantized = operand.int8.reshape(groups.shape).astype(np.float64)
    np.testing.assert_allclose(operand.scales, np.abs(groups).max(-1) / 127, rtol=2e-7)
    np.testing.assert_array_equal(operand.sums, quantized.sum(-1))
    error = np.abs(quantized * operand.scales[..., None] - groups)
    assert (error <= operand.scales[..., None] * 0.50001).all()


def test_operand_of_odd_groups(ops: Operations) -> None:
    """Zeros, numbers too small for a scale, one large among small ones; what is no number is not hidden."""
    x = np.zeros((6, 32), np.float32)
    x[1:, 5] = [1e-40, 1e4, np.nan, np.inf, -127.0]
    operand = OperandRows(ops, "q8", x)
    if operand.form != "int8":
        pytest.skip("this tier's products take no int8 activations")
    np.testing.assert_array_equal(operand.int8[:2], np.zeros((2, 32)))
    assert (operand.scales[:2] < 1e-30).all()
    assert not operand.sums[:2].any()
    assert operand.int8[2, 5] == 127
    assert operand.scales[2] == np.float32(1e4) / np.float32(127)
    assert np.isnan(operand.scales[3:5]).all()
    assert (operand.int8[5, 5], operand.scales[5], operand.sums[5]) == (-127, 1, -127)
