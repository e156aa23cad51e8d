"""Wrong arguments to the CPU engine are refused, with the field, its value and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from trioserve_kernels.native import (
    Activation,
    Decoder,
    DecoderLayer,
    DecoderShape,
    Element,
    Format,
    KvFormat,
    Library,
    PackedMatrix,
    Placement,
    Source,
    ThreadPool,
    available_tiers,
    dequantize,
    gate_up_rows,
    load,
    row_bytes,
    step_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Use = Callable[[PackedMatrix, ThreadPool], object]


@pytest.fixture(scope="module")
def library() -> Library:
    if not available_tiers():
        pytest.skip("no library was built")
    return load(available_tiers()[0])


@pytest.fixture
def pool(library: Library) -> Iterator[ThreadPool]:
    with ThreadPool(library, 1) as pool:
        yield pool


@pytest.fixture
def matrix(library: Library) -> Iterator[PackedMatrix]:
    """[20, 64], bf16 and not filled."""
    with PackedMatrix(library, 64) as matrix:
        matrix.add_segment(Format.BF16, 20)
        yield matrix


def weights(rows: int, columns: int = 64) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.zeros((rows, columns), np.float32)


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_threads(library: Library, threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {threads}; it must be between 1 and 1024"):
        ThreadPool(library, threads)


def test_columns(library: Library) -> None:
    with pytest.raises(ValueError, match="columns is 0; it must be between 1 and"):
        PackedMatrix(library, 0)


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda m, p: m.add_segment(Format.F32, 0), "rows is 0; it must be"),
        (lambda m, p: m.add_segment(Format.F32, 16), "20 rows are there; only behind a multiple of 16"),
        (lambda m, p: m.fill(p, Source.F32, weights(0), 0), "num_rows is 0; it must be at least 1"),
        (lambda m, p: m.fill(p, Source.F32, weights(21), 21), "num_rows is 21: .*they end at row 21 of 20"),
        (lambda m, p: m.fill(p, Source.F32, weights(9), 9, Placement.ups()), "end at row 25 of 20"),
        (lambda m, p: m.fill(p, Source.F32, weights(2), 2, Placement(2, 1)), "stride is 1; .* at least 2"),
        (lambda m, p: m.fill(p, Source.F32, weights(2), 2, Placement(offset=-1)), "offset is -1"),
        (lambda m, p: m.fill(p, Source.F32, weights(20), 19), "data is an array of 5120 bytes; .*have 4864"),
        (lambda m, p: m.fill(p, Source.F32, weights(64, 20).T, 20), "data is an array with strides"),
        (lambda m, p: m.fill(p, Source.F32, 0, 20), "data is 0"),
        (lambda m, p: m.fill(p, Source.Q4_K, weights(20), 20), "columns is 64; .*multiple of 256"),
        (lambda m, p: m.fill_bias(weights(21, 1), 21), "num_rows is 21"),
        (lambda m, p: m.unpack_row(20), "row is 20; it must be between 0 and 19"),
        (lambda m, p: m.multiply(p, weights(3, 65)), r"x is float32 \[3, 65\]; .*\[num_rows, 64\]"),
        (lambda m, p: m.multiply(p, weights(3).astype(np.float64)), "x is float64"),
    ],
)
def test_use_of_a_matrix(matrix: PackedMatrix, pool: ThreadPool, use: Use, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        use(matrix, pool)


def test_blocks_go_only_where_nothing_is_lost(library: Library, pool: ThreadPool) -> None:
    with PackedMatrix(library, 64) as matrix:
        with pytest.raises(ValueError, match="format is missing"):
            matrix.fill(pool, Source.Q8_0, 1, 16)
        matrix.add_segment(Format.Q4, 16)
        with pytest.raises(
            ValueError, match=r"format is Q4; for rows of Q8_0 .* one of F32, BF16, Q8, SPLIT$"
        ):
            matrix.fill(pool, Source.Q8_0, np.zeros((16, row_bytes(Source.Q8_0, 64)), np.uint8), 16)


def test_a_closed_matrix(library: Library) -> None:
    with PackedMatrix(library, 64) as matrix:
        matrix.add_segment(Format.F32, 16)
    with pytest.raises(ValueError, match="this PackedMatrix is closed"):
        matrix.unpack_row(0)


def test_blocks_to_dequantize(library: Library) -> None:
    assert dequantize(library, Source.Q8_0, np.zeros(0, np.uint8), 0).size == 0
    with pytest.raises(ValueError, match="columns is 31; rows of Q8_0 must have a multiple of 32"):
        dequantize(library, Source.Q8_0, np.zeros(34, np.uint8), 31)
    with pytest.raises(ValueError, match="blocks is an array of 33 bytes; it must have 34"):
        dequantize(library, Source.Q8_0, np.zeros(33, np.uint8), 32)


# A decoder of one layer

SHAPE = DecoderShape(
    hidden_size=64,
    intermediate_size=20,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=20,
    activation=Activation.SILU,
    element=Element.F32,
    kv_format=KvFormat.F32,
    block_size=16,
    num_groups=1,
    group_places=1,
    rms_norm_eps=1e-6,
    attention_scale=0.125,
)
ONES = np.ones(64, np.float32)


@pytest.fixture
def layer(library: Library) -> Iterator[DecoderLayer]:
    sizes = {
        "qkv": (256, 64),
        "output": (64, 128),
        "gate_up": (gate_up_rows(20), 64),
        "down": (64, 20),
    }
    matrices = {}
    for name, (rows, columns) in sizes.items():
        matrices[name] = PackedMatrix(library, columns)
        matrices[name].add_segment(Format.F32, rows)
    yield DecoderLayer(
        **matrices, attention_norm=ONES, mlp_norm=ONES, rotary_frequencies=np.ones(32, np.float32)
    )
    for matrix in matrices.values():
        matrix.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 63}, "hidden_size is 63; it must be a multiple of 2"),
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads is 3; it must be a multiple of 2"),
        ({"block_size": 8}, "block_size is 8; it must be at least 16"),
        ({"block_size": 24}, "block_size is 24; it must be a multiple of 16"),
        ({"vocab_size": 21}, r"embedding is \[20, 64\]; it must be \[21, 64\]"),
        ({"intermediate_size": 8}, r"gate_up is \[48, 64\]; it must be \[16, 64\]"),
        ({"head_dim": 32}, r"qkv is \[256, 64\]; it must be \[128, 64\]"),
    ],
)
def test_shapes(
    pool: ThreadPool, matrix: PackedMatrix, layer: DecoderLayer, changes: dict[str, int], problem: str
) -> None:
    shape = attrs.evolve(SHAPE, **changes)
    with pytest.raises(ValueError, match=problem):
        Decoder(pool, shape, embedding=matrix, head=matrix, final_norm=ONES, layers=[layer])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"group": 1}, "group is 1; it must be between 0 and 0"),
        ({"place": 1}, "place is 1; it must be between 0 and 0"),
        ({"key_norm": np.ones(32, np.float32)}, "key_norm is an array of 128 bytes; it must have 256"),
        ({"mlp_norm": np.ones(64)}, "mlp_norm is float64; it must be float32"),
    ],
)
def test_layers(
    pool: ThreadPool, matrix: PackedMatrix, layer: DecoderLayer, changes: dict[str, object], problem: str
) -> None:
    changed = attrs.evolve(layer, **changes)
    with pytest.raises(ValueError, match=problem):
        Decoder(pool, SHAPE, embedding=matrix, head=matrix, final_norm=ONES, layers=[changed])


def test_caches(pool: ThreadPool, matrix: PackedMatrix, layer: DecoderLayer) -> None:
    with Decoder(pool, SHAPE, embedding=matrix, head=matrix, final_norm=ONES, layers=[layer]) as decoder:
        assert decoder.block_bytes == 16 * 64 * 2 * 4  # keys and values of 16 tokens, fp32
        with pytest.raises(ValueError, match="cache is an array of 8191 bytes; it must have 8192"):
            decoder.set_cache(np.zeros(8191, np.uint8), 1)
        memory = np.zeros(8192 + 64, np.uint8)
        odd = 1 - memory.ctypes.data % 64
        with pytest.raises(ValueError, match=r"cache is at address .*; it must be a multiple of 64"):
            decoder.set_cache(memory[odd % 64 :][:8192], 1)
        with pytest.raises(ValueError, match="num_layers is 2; it must be between 0 and 1"):
            decoder.forward_layers(step_of(*[np.zeros(0, np.int32)] * 2, *tables()), 2, 0)


def tables() -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int32]], ...]:
    return np.zeros(2, np.int32), np.zeros((1, 1, 1), np.int32)


def test_steps() -> None:
    ids = np.zeros(3, np.int32)
    step = step_of(ids, ids, *tables())
    assert (step.num_tokens, step.num_sequences, step.table_width) == (3, 1, 1)
    with pytest.raises(ValueError, match="positions is int64; it must be int32"):
        step_of(ids, ids.astype(np.int64), *tables())
    with pytest.raises(ValueError, match="positions is an array of 8 bytes; it must have 12"):
        step_of(ids, ids[:2], *tables())
