"""The CPU engine's packed weights are what they were packed from, on every tier that this machine can run."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers_kernel_matrix import (
    DENSE,
    LOSSLESS,
    as_bf16,
    blocks,
    dense_rows,
    from_bf16,
    in_two_parts,
    panels,
    quantized_to_q4,
    quantized_to_q8,
    unpacked_panels,
    values_of_blocks,
)
from trioserve_kernels.native import (
    Format,
    Library,
    PackedMatrix,
    Placement,
    Source,
    ThreadPool,
    available_tiers,
    dequantize,
    load,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

QUANTIZED = {Format.Q8: quantized_to_q8, Format.Q4: quantized_to_q4}
RAGGED = [(1, 1), (15, 31), (16, 32), (17, 33), (40, 96), (48, 130), (70, 576)]


@pytest.fixture(params=available_tiers())
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


@pytest.fixture
def pool(library: Library) -> Iterator[ThreadPool]:
    with ThreadPool(library, 3) as pool:
        yield pool


@pytest.fixture
def one_thread(library: Library) -> Iterator[ThreadPool]:
    with ThreadPool(library, 1) as pool:
        yield pool


def packed(pool: ThreadPool, form: Format, source: Source, data: NDArray[Any], columns: int) -> PackedMatrix:
    matrix = PackedMatrix(pool.library, columns)
    matrix.add_segment(form, len(data))
    matrix.fill(pool, source, data, len(data))
    return matrix


def rows_of(matrix: PackedMatrix) -> NDArray[np.float32]:
    return np.stack([matrix.unpack_row(row) for row in range(matrix.rows)])


def stored(form: Format, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a format makes of weights."""
    if form in QUANTIZED:
        return QUANTIZED[form](values)
    if form is Format.SPLIT:
        return in_two_parts(values)
    return from_bf16(as_bf16(values)) if form is Format.BF16 else values


def weights(rows: int, columns: int) -> NDArray[np.float32]:
    """Groups of many sizes, so that each has a scale of its own."""
    random = np.random.default_rng(rows * 1000 + columns)
    sizes = 2.0 ** random.integers(-12, 3, (rows, -(-columns // 8)))
    values = random.standard_normal((rows, columns)) * sizes.repeat(8, axis=1)[:, :columns]
    return values.astype(np.float32)


# From numbers


@pytest.mark.parametrize("source", DENSE, ids=lambda source: source.name)
def test_numbers_are_kept_or_rounded(pool: ThreadPool, source: Source) -> None:
    for rows, columns in RAGGED:
        data, values = dense_rows(source, weights(rows, columns))
        with packed(pool, Format.F32, source, data, columns) as matrix:
            np.testing.assert_array_equal(rows_of(matrix), values)
        with packed(pool, Format.BF16, source, data, columns) as matrix:
            np.testing.assert_array_equal(rows_of(matrix), from_bf16(as_bf16(values)))
        with packed(pool, Format.SPLIT, source, data, columns) as matrix:
            np.testing.assert_array_equal(rows_of(matrix), in_two_parts(values))


@pytest.mark.parametrize("form", [Format.F32, Format.BF16], ids=lambda form: form.name)
def test_special_numbers_are_kept(one_thread: ThreadPool, form: Format) -> None:
    halves = [0.0, -0.0, np.inf, -np.inf, 2.0**-24, -(2.0**-20), 65504.0, 1.0]
    values = np.array([halves * 4], np.float32)
    for source in DENSE:
        data, expected = dense_rows(source, values)
        with packed(one_thread, form, source, data, 32) as matrix:
            got = matrix.unpack_row(0)
        np.testing.assert_array_equal(got.view(np.uint32), stored(form, expected[0]).view(np.uint32))


def test_every_bf16_comes_back_bit_for_bit(one_thread: ThreadPool) -> None:
    data = np.arange(2**16, dtype=np.uint16).reshape(64, 1024)
    with packed(one_thread, Format.BF16, Source.BF16, data, 1024) as matrix:
        np.testing.assert_array_equal(rows_of(matrix).view(np.uint32), data.astype(np.uint32) << 16)


def test_rounding_to_bf16_goes_to_even_in_ties(one_thread: ThreadPool) -> None:
    ties = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-23] * 8], np.float32)
    with packed(one_thread, Format.BF16, Source.F32, ties, 32) as matrix:
        assert matrix.unpack_row(0)[:4].tolist() == [1, 1 + 2**-6, -1, 1 + 2**-7]


@pytest.mark.parametrize("form", QUANTIZED, ids=lambda form: form.name)
def test_quantization_is_the_formula(pool: ThreadPool, form: Format) -> None:
    for (rows, columns), source in itertools.product(RAGGED, DENSE):
        data, values = dense_rows(source, weights(rows, columns))
        with packed(pool, form, source, data, columns) as matrix:
            np.testing.assert_array_equal(rows_of(matrix), QUANTIZED[form](values))


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_any_number_of_threads_packs_the_same(library: Library, threads: int) -> None:
    values = weights(83, 96)
    with ThreadPool(library, threads) as pool, packed(pool, Format.Q4, Source.F32, values, 96) as matrix:
        np.testing.assert_array_equal(rows_of(matrix), quantized_to_q4(values))


@pytest.mark.parametrize("form", QUANTIZED, ids=lambda form: form.name)
def test_equal_weights_are_quantized_to_nearly_themselves(one_thread: ThreadPool, form: Format) -> None:
    values = np.array([0, 1, -3, 2.0**-30, 60000], np.float32).repeat(32).reshape(5, 32)
    with packed(one_thread, form, Source.F32, values, 32) as matrix:
        np.testing.assert_allclose(rows_of(matrix), values, rtol=2**-11, atol=2**-24)


def test_quantized_weights_are_never_off_by_more_than_a_step(one_thread: ThreadPool) -> None:
    values = np.random.default_rng(7).standard_normal((64, 256)).astype(np.float32)
    groups = values.reshape(64, -1, 32)
    largest, span = np.abs(groups).max(axis=2), np.ptp(groups, axis=2)
    for form, step in (Format.Q8, largest / 127), (Format.Q4, span / 15):
        with packed(one_thread, form, Source.F32, values, 256) as matrix:
            off = np.abs(rows_of(matrix) - values).reshape(groups.shape).max(axis=2)
        assert (off <= step * 0.51).all()


# From blocks


@pytest.mark.parametrize("source", LOSSLESS, ids=lambda source: source.name)
def test_blocks_are_kept_without_loss(pool: ThreadPool, source: Source) -> None:
    for rows in (1, 16, 33):
        data = blocks(source, rows, 768)
        with packed(pool, LOSSLESS[source], source, data, 768) as matrix:
            np.testing.assert_array_equal(rows_of(matrix), values_of_blocks(source, data))


@pytest.mark.parametrize("source", [Source.Q8_0, Source.Q4_0, Source.Q4_1], ids=lambda source: source.name)
def test_blocks_of_32_need_no_more_than_32_columns(one_thread: ThreadPool, source: Source) -> None:
    data = blocks(source, 18, 96)
    with packed(one_thread, LOSSLESS[source], source, data, 96) as matrix:
        np.testing.assert_array_equal(rows_of(matrix), values_of_blocks(source, data))


@pytest.mark.parametrize("source", LOSSLESS, ids=lambda source: source.name)
def test_blocks_are_turned_into_numbers(pool: ThreadPool, source: Source) -> None:
    data = blocks(source, 20, 512)
    values = values_of_blocks(source, data)
    with packed(pool, Format.F32, source, data, 512) as matrix:
        np.testing.assert_array_equal(rows_of(matrix), values)
    with packed(pool, Format.BF16, source, data, 512) as matrix:
        np.testing.assert_array_equal(rows_of(matrix), from_bf16(as_bf16(values)))


@pytest.mark.parametrize("source", LOSSLESS, ids=lambda source: source.name)
def test_dequantize_is_what_gguf_has(library: Library, source: Source) -> None:
    data = blocks(source, 7, 512, seed=3)
    got = dequantize(library, source, data.reshape(-1), 7 * 512)
    np.testing.assert_array_equal(got, values_of_blocks(source, data).reshape(-1))


@pytest.mark.parametrize("source", [Source.Q8_0, Source.Q4_1], ids=lambda source: source.name)
def test_fp16_scales_are_kept_bit_for_bit(one_thread: ThreadPool, source: Source) -> None:
    data = blocks(source, 16, 32)
    with packed(one_thread, LOSSLESS[source], source, data, 32) as matrix:
        panel = panels(matrix)[0]
    fields = 1 if source is Source.Q8_0 else 2
    quants = 512 if source is Source.Q8_0 else 256
    stored = panel[quants : quants + fields * 32].view(np.uint16).reshape(fields, 16)
    np.testing.assert_array_equal(stored, data[:, : 2 * fields].copy().view(np.uint16).T)


# Unpacked for products


@pytest.mark.parametrize("source", LOSSLESS, ids=lambda source: source.name)
def test_panels_of_blocks_unpack_to_their_numbers(one_thread: ThreadPool, source: Source) -> None:
    data = blocks(source, 48, 768, seed=5)
    values = values_of_blocks(source, data)
    with packed(one_thread, LOSSLESS[source], source, data, 768) as matrix:
        np.testing.assert_array_equal(unpacked_panels(matrix), values)


@pytest.mark.parametrize(
    "form", [Format.F32, Format.BF16, Format.SPLIT, *QUANTIZED], ids=lambda form: form.name
)
def test_what_is_padded_unpacks_to_no_weight(one_thread: ThreadPool, form: Format) -> None:
    values = weights(21, 70)
    with packed(one_thread, form, Source.F32, values, 70) as matrix:
        rows = rows_of(matrix)
        unpacked = unpacked_panels(matrix)
    np.testing.assert_array_equal(unpacked[:21, :70], rows)
    assert not unpacked[21:].view(np.uint32).any()
    if form is not Format.Q4:  # whose steps need not meet 0; activations are padded with zeros too
        assert not unpacked[:, 70:].any()


# Where rows go


@pytest.mark.parametrize("form", [Format.F32, *QUANTIZED], ids=lambda form: form.name)
def test_gates_and_ups_interleave_by_eights(pool: ThreadPool, form: Format) -> None:
    gates, ups = weights(40, 64), weights(40, 64) * 2
    with PackedMatrix(pool.library, 64) as matrix:
        matrix.add_segment(form, 80)
        matrix.fill(pool, Source.F32, gates, 40, Placement.gates())
        matrix.fill(pool, Source.F32, ups, 40, Placement.ups())
        rows = rows_of(matrix).reshape(5, 2, 8, 64)
    np.testing.assert_array_equal(rows[:, 0].reshape(40, 64), stored(form, gates))
    np.testing.assert_array_equal(rows[:, 1].reshape(40, 64), stored(form, ups))


@pytest.mark.parametrize("form", [Format.BF16, Format.Q8], ids=lambda form: form.name)
def test_parts_that_share_a_panel_leave_each_other_alone(pool: ThreadPool, form: Format) -> None:
    parts = [weights(rows, 48) for rows in (20, 7, 5, 30)]
    with PackedMatrix(pool.library, 48) as matrix:
        matrix.add_segment(form, 62)
        offset = 0
        for part in parts:
            matrix.fill(pool, Source.F32, part, len(part), Placement(offset=offset))
            offset += len(part)
        rows = rows_of(matrix)
    with packed(pool, form, Source.F32, np.concatenate(parts), 48) as whole:
        np.testing.assert_array_equal(rows, rows_of(whole))


def test_segments_of_different_formats_follow_each_other(pool: ThreadPool) -> None:
    plain, eight_bits, last = weights(32, 256), weights(48, 256), blocks(Source.Q4_K, 9, 256)
    with PackedMatrix(pool.library, 256) as matrix:
        matrix.add_segment(Format.F32, 32)
        matrix.fill(pool, Source.F32, plain, 32)
        matrix.add_segment(Format.Q8, 48)
        matrix.fill(pool, Source.F32, eight_bits, 48)
        matrix.add_segment(Format.Q4_WIDE, 9)
        matrix.fill(pool, Source.Q4_K, last, 9)
        rows = rows_of(matrix)
    expected = [plain, quantized_to_q8(eight_bits), values_of_blocks(Source.Q4_K, last)]
    np.testing.assert_array_equal(rows, np.concatenate(expected))


@pytest.mark.parametrize("form", Format, ids=lambda form: form.name)
def test_rows_that_were_not_filled_are_zero(library: Library, form: Format) -> None:
    with PackedMatrix(library, 50) as matrix:
        matrix.add_segment(form, 19)
        assert not rows_of(matrix).any()


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (Format.F32, 32),
        (Format.BF16, 16),
        (Format.SPLIT, 32),
        (Format.Q8, 8.5),
        (Format.Q8_16, 10),
        (Format.Q4, 5),
        (Format.Q4_WIDE, 6),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_weight_takes_so_many_bits(library: Library, form: Format, bits: float) -> None:
    with PackedMatrix(library, 256) as matrix:
        matrix.add_segment(form, 64)
        assert matrix.nbytes * 8 == 64 * 256 * bits
