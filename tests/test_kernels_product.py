"""The CPU engine's matrix products against float64, and bit for bit whatever rows are beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from helpers_kernel_matrix import (
    as_bf16,
    blocks,
    from_bf16,
    in_two_parts,
    quantized_to_q4,
    quantized_to_q8,
    values_of_blocks,
)
from trioserve_kernels.native import Format, Library, PackedMatrix, Source, ThreadPool, available_tiers, load

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = {Format.Q8_16: Source.Q6_K, Format.Q4_WIDE: Source.Q4_K}
FORMATS = pytest.mark.parametrize("form", list(Format), ids=lambda form: form.name)
QUANTIZED = [Format.Q8, Format.Q8_16, Format.Q4, Format.Q4_WIDE]
INT8_TIERS = [tier for tier in available_tiers() if tier == "amx" or tier.startswith("avx512")]
"""Whose products of quantized weights are sums of integers."""
RELATIVE_ERROR = 1e-6
"""Of sums in fp32, against the sum of the terms' magnitudes."""


@attrs.frozen
class Weights:
    matrix: PackedMatrix
    values: NDArray[np.float64]
    bias: NDArray[np.float32]


@pytest.fixture(params=available_tiers())
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


@pytest.fixture
def pool(library: Library) -> Iterator[ThreadPool]:
    with ThreadPool(library, 1) as pool:
        yield pool


@pytest.fixture
def three_threads(library: Library) -> Iterator[ThreadPool]:
    with ThreadPool(library, 3) as pool:
        yield pool


def fill(matrix: PackedMatrix, pool: ThreadPool, form: Format, rows: int, seed: int) -> NDArray[np.float32]:
    """Add a segment of random weights; returns them as the format holds them."""
    columns = matrix.columns
    matrix.add_segment(form, rows)
    if form in BLOCKS:
        data = blocks(BLOCKS[form], rows, columns, seed)
        matrix.fill(pool, BLOCKS[form], data, rows)
        return values_of_blocks(BLOCKS[form], data)
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    matrix.fill(pool, Source.F32, values, rows)
    if form is Format.BF16:
        return from_bf16(as_bf16(values))
    if form is Format.SPLIT:
        return in_two_parts(values)
    if form is Format.Q8:
        return quantized_to_q8(values)
    return quantized_to_q4(values) if form is Format.Q4 else values


def multiplied_as(library: Library, form: Format) -> str:
    """The number format in which a tier multiplies weights of a format, see `cpu/tier.h`."""
    if form in {Format.F32, Format.SPLIT}:
        return "fp32"
    if form is Format.BF16:
        return "bf16" if library.tier in ("amx", "avx512_bf16") else "fp32"
    return "int8" if library.tier in INT8_TIERS else "fp32"


def weights_of(pool: ThreadPool, segments: list[tuple[Format, int]], columns: int) -> Weights:
    """A matrix of several segments, the values that are multiplied, and a bias."""
    matrix = PackedMatrix(pool.library, columns)
    values, biases = [], []
    for seed, (form, rows) in enumerate(segments):
        held = fill(matrix, pool, form, rows, seed)
        if multiplied_as(pool.library, form) == "bf16":
            held = from_bf16(as_bf16(held))
        bias = np.random.default_rng(seed).standard_normal(rows, np.float32)
        matrix.fill_bias(bias, rows)
        values.append(held)
        biases.append(bias)
    return Weights(matrix, np.concatenate(values).astype(np.float64), np.concatenate(biases))


def exact_activations(rows: int, columns: int) -> NDArray[np.float32]:
    """Integers up to 127 times a power of two per 32 columns, each with a 127: exact as bf16 and as int8."""
    random = np.random.default_rng(rows * 10_000 + columns)
    groups = -(-columns // 32)
    steps = random.integers(-127, 128, (rows, groups, 32))
    steps[..., 0] = 127
    sizes = 2.0 ** random.integers(-9, 4, (rows, groups, 1))
    return np.ascontiguousarray((steps * sizes).reshape(rows, -1)[:, :columns], np.float32)


def check(weights: Weights, x: NDArray[np.float32], products: NDArray[np.float32]) -> None:
    """x: as it is multiplied."""
    wide = x.astype(np.float64)
    expected = wide @ weights.values.T + weights.bias
    size = np.abs(wide) @ np.abs(weights.values).T + np.abs(weights.bias)
    assert (np.abs(products - expected) <= RELATIVE_ERROR * size).all()


# Against float64


@FORMATS
def test_products_are_those_of_float64(pool: ThreadPool, form: Format) -> None:
    weights = weights_of(pool, [(form, 100)], 256)
    with weights.matrix as matrix:
        for rows in (1, 2, 7, 13, 16, 17, 31, 32, 33, 70):
            x = exact_activations(rows, 256)
            check(weights, x, matrix.multiply(pool, x))


@pytest.mark.parametrize(
    "form", [Format.F32, Format.BF16, Format.SPLIT, Format.Q8, Format.Q4], ids=lambda form: form.name
)
def test_columns_need_not_fill_a_group(pool: ThreadPool, form: Format) -> None:
    for columns in (2, 32, 34, 64, 100, 576, 1000):
        x = exact_activations(19, columns)
        weights = weights_of(pool, [(form, 50)], columns)
        with weights.matrix as matrix:
            check(weights, x, matrix.multiply(pool, x))


def test_outputs_need_not_fill_a_panel(three_threads: ThreadPool) -> None:
    x = exact_activations(9, 96)
    for out in (1, 15, 16, 17, 33, 48, 49, 95):
        weights = weights_of(three_threads, [(Format.BF16, out)], 96)
        with weights.matrix as matrix:
            check(weights, x, matrix.multiply(three_threads, x))


def test_segments_of_different_formats_make_one_matrix(three_threads: ThreadPool) -> None:
    x = exact_activations(21, 256)
    weights = weights_of(three_threads, [(form, 48) for form in Format] + [(Format.Q8, 7)], 256)
    with weights.matrix as matrix:
        check(weights, x, matrix.multiply(three_threads, x))


def test_more_columns_and_rows_than_caches_hold(pool: ThreadPool) -> None:
    x = exact_activations(300, 4000)
    weights = weights_of(pool, [(Format.BF16, 20)], 4000)
    with weights.matrix as matrix:
        products = matrix.multiply(pool, x)
        check(weights, x, products)
        for row in (0, 31, 32, 95, 191, 192, 299):
            np.testing.assert_array_equal(matrix.multiply(pool, x[row : row + 1])[0], products[row])


@pytest.mark.parametrize("form", [Format.F32, Format.BF16], ids=lambda form: form.name)
def test_activations_are_rounded_once_where_products_take_bf16(pool: ThreadPool, form: Format) -> None:
    x = np.random.default_rng(5).standard_normal((33, 200), np.float32)
    weights = weights_of(pool, [(form, 64)], 200)
    rounded = from_bf16(as_bf16(x)) if multiplied_as(pool.library, form) == "bf16" else x
    with weights.matrix as matrix:
        check(weights, rounded, matrix.multiply(pool, x))


def test_a_row_that_is_not_a_number_leaves_the_others_alone(pool: ThreadPool) -> None:
    for form in Format:
        x = exact_activations(35, 256)
        weights = weights_of(pool, [(form, 32)], 256)
        with weights.matrix as matrix:
            before = matrix.multiply(pool, x)
            x[[3, 33], 40] = np.nan
            after = matrix.multiply(pool, x)
        assert np.isnan(after[[3, 33]]).all()
        others = np.delete(np.arange(35), [3, 33])
        np.testing.assert_array_equal(after[others], before[others])


# Bit for bit


@FORMATS
def test_bits_do_not_depend_on_the_rows_beside(pool: ThreadPool, form: Format) -> None:
    x = np.random.default_rng(1).standard_normal((110, 768), np.float32)
    with weights_of(pool, [(form, 80)], 768).matrix as matrix:
        products = matrix.multiply(pool, x)
        for rows in range(1, 41):
            np.testing.assert_array_equal(matrix.multiply(pool, x[:rows]), products[:rows])
        for first in (1, 15, 16, 17, 32, 50, 77):
            np.testing.assert_array_equal(matrix.multiply(pool, x[first : first + 33]), products[first:][:33])


@pytest.mark.skipif(len(INT8_TIERS) < 2, reason="this machine runs at most one such tier")
@pytest.mark.parametrize("form", QUANTIZED, ids=lambda form: form.name)
def test_bits_of_integer_sums_do_not_depend_on_the_tier(form: Format) -> None:
    """Nor on how a tier makes them: by dot products for a few rows, by tiles for many."""
    x = np.random.default_rng(4).standard_normal((45, 1280), np.float32)
    products = []
    for tier in INT8_TIERS:
        library = load(tier)
        with ThreadPool(library, 1) as pool, weights_of(pool, [(form, 48)], 1280).matrix as matrix:
            products += [
                matrix.multiply(pool, x),
                np.stack([matrix.multiply(pool, row[None])[0] for row in x]),
            ]
    for others in products[1:]:
        np.testing.assert_array_equal(others, products[0])


@FORMATS
def test_bits_do_not_depend_on_the_panels_beside(
    pool: ThreadPool, three_threads: ThreadPool, form: Format
) -> None:
    x = np.random.default_rng(2).standard_normal((37, 512), np.float32)
    with weights_of(pool, [(form, 200)], 512).matrix as matrix:
        np.testing.assert_array_equal(matrix.multiply(three_threads, x), matrix.multiply(pool, x))


def test_bits_do_not_depend_on_where_columns_are_cut(pool: ThreadPool) -> None:
    """Several tiles of rows take a part of the columns at a time, one takes all."""
    x = np.random.default_rng(3).standard_normal((100, 3000), np.float32)
    for form in (Format.F32, Format.BF16, Format.SPLIT, Format.Q8, Format.Q4):
        with weights_of(pool, [(form, 40)], 3000).matrix as matrix:
            products = matrix.multiply(pool, x)
            for row in (0, 17, 50, 99):
                np.testing.assert_array_equal(matrix.multiply(pool, x[row : row + 1])[0], products[row])
