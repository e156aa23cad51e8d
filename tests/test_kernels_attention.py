"""The CPU engine's attention over a paged cache (kernels/cpu/attention.h), against the reference in torch: on
each tier of processors that this machine can run. All memory that was never written is NaN."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import TYPE_CHECKING, Final

import attrs
import pytest
import torch

from trioserve_kernels.native import Element, KvFormat, available_tiers, load
from trioserve_kernels.reference import paged_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

SEGMENT: Final = 256
"""Tokens whose softmax is computed together."""


class Case(ctypes.Structure):
    """ts_test_attention_case (kernels/cpu/attention_testing.h)."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", "kv_format", "num_heads", "kv_heads", "head_dim")),
        *(
            (name, ctypes.c_int32)
            for name in ("block_size", "places", "num_groups", "place", "group", "window")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("threads", "num_tokens", "num_sequences", "table_width")),
        *((name, ctypes.c_void_p) for name in ("positions", "starts", "block_tables")),
    )


@attrs.frozen(kw_only=True)
class Layer:
    """A layer's shape, and the cache's."""

    element: Element = Element.BF16
    kv_format: KvFormat = KvFormat.BF16
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.element is Element.F32 else torch.bfloat16


@attrs.frozen(eq=False)
class Tokens:
    """What a model would compute of a sequence: [L, heads, D]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@attrs.frozen
class Chunk:
    """Tokens [first, end) of a sequence, by its number."""

    sequence: int
    first: int
    end: int


@functools.cache
def sequence(layer: Layer, length: int, seed: int) -> Tokens:
    """Scores vary by some units, so that some keys count for much and most for something."""
    generator = torch.Generator().manual_seed(seed)
    heads = (layer.heads, layer.kv_heads, layer.kv_heads)
    return Tokens(
        *(torch.randn(length, n, layer.head_dim, generator=generator).mul(1.5).to(layer.dtype) for n in heads)
    )


class Cache:
    """One tier's cache, and its steps: of the second of three layers, in the second of two groups."""

    PLACE, PLACES, GROUP, GROUPS = 1, 3, 1, 2

    def __init__(self, tier: str, layer: Layer, sequences: Sequence[Tokens]) -> None:
        self.layer = layer
        self.sequences = sequences
        self._functions = load(tier).functions
        self._functions.ts_test_attention_block_bytes.restype = ctypes.c_size_t
        self.width = max(-(-len(s.keys) // layer.block_size) for s in sequences) + 1
        num_blocks = self.width * len(sequences)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self.blocks = order.int().view(len(sequences), self.width)
        block_bytes = self._functions.ts_test_attention_block_bytes(ctypes.byref(self._case()))
        # The kernels are promised a place that is a multiple of 64.
        memory = torch.full((num_blocks * block_bytes + 64,), 0xFF, dtype=torch.uint8)
        start = -memory.data_ptr() % 64
        self.pool = memory[start : start + num_blocks * block_bytes].view(num_blocks, block_bytes)

    def _case(self) -> Case:
        layer = self.layer
        return Case(
            element=layer.element,
            kv_format=layer.kv_format,
            num_heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            block_size=layer.block_size,
            places=self.PLACES,
            num_groups=self.GROUPS,
            place=self.PLACE,
            group=self.GROUP,
            window=layer.window,
            scale=layer.head_dim**-0.5,
        )

    def _tables(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """[groups, S, width]: -1 where no query looks, and all over the group that is not the layer's."""
        tables = torch.full((self.GROUPS, len(chunks), self.width), -1, dtype=torch.int32)
        for row, chunk in zip(tables[self.GROUP], chunks, strict=True):
            oldest = max(0, chunk.first - self.layer.window + 1) if self.layer.window else 0
            seen = slice(oldest // self.layer.block_size, (chunk.end - 1) // self.layer.block_size + 1)
            row[seen] = self.blocks[chunk.sequence, seen]
        return tables

    def attend(self, chunks: Sequence[Chunk], threads: int = 1) -> list[torch.Tensor]:
        """One step: each chunk's outputs, [tokens, heads, D]."""
        tables = self._tables(chunks)
        sizes = [chunk.end - chunk.first for chunk in chunks]
        positions = torch.cat([torch.arange(c.first, c.end, dtype=torch.int32) for c in chunks])
        starts = torch.tensor([0, *sizes]).cumsum(0).int()
        queries, keys, values = (
            torch.cat([getattr(self.sequences[c.sequence], name)[c.first : c.end] for c in chunks])
            for name in ("queries", "keys", "values")
        )
        output = torch.full_like(queries, torch.nan)
        case = self._case()
        case.threads, case.num_tokens, case.num_sequences = threads, len(positions), len(chunks)
        case.table_width = self.width
        case.positions, case.starts = positions.data_ptr(), starts.data_ptr()
        case.block_tables = tables.data_ptr()
        self.splits = self._functions.ts_test_attention_splits(ctypes.byref(case))
        tensors = (self.pool, queries, keys, values, output)
        self._functions.ts_test_attention(
            ctypes.byref(case), *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        )
        return [output[first:end] for first, end in itertools.pairwise(starts.tolist())]

    def check(self, chunks: Sequence[Chunk], threads: int = 1) -> None:
        # bf16: probabilities are rounded, and the output: 2^-9 of each, of values up to about 6.
        tolerance = 2e-5 if self.layer.element is Element.F32 else 3e-2
        for chunk, output in zip(chunks, self.attend(chunks, threads), strict=True):
            exact = expected(self.layer, self.sequences[chunk.sequence], chunk.first, chunk.end)
            torch.testing.assert_close(output.float(), exact, rtol=0, atol=tolerance)


@functools.cache
def expected(layer: Layer, whole: Tokens, first: int, end: int) -> torch.Tensor:
    """The outputs of tokens [first, end) by the reference, in fp32."""
    keys, values = (as_cached(layer, x[:end]) for x in (whole.keys, whole.values))
    return paged_attention(
        whole.queries[first:end].float(),
        keys[None],
        values[None],
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_starts=torch.tensor([0, end - first]),
        sequence_lengths=torch.tensor([end]),
        scale=layer.head_dim**-0.5,
        window=layer.window or None,
    )


def as_cached(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if layer.kv_format is not KvFormat.INT8:
        return x.float()
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round() * scale


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


FP32 = Layer(element=Element.F32, kv_format=KvFormat.F32)
BF16 = Layer()
INT8 = Layer(kv_format=KvFormat.INT8)
FP32_INT8 = Layer(element=Element.F32, kv_format=KvFormat.INT8)
FORMATS = {"fp32": FP32, "bf16": BF16, "int8": INT8, "fp32-int8": FP32_INT8}
SHAPES: Final = {
    "smollm2": Layer(),
    "qwen2.5": Layer(heads=14, kv_heads=2, block_size=32),
    "gemma3": Layer(heads=4, kv_heads=1, head_dim=256, window=100),
    "head96": Layer(heads=4, kv_heads=2, head_dim=96, window=16),
    "head128": Layer(heads=8, kv_heads=1, head_dim=128, block_size=256),
    "head24": Layer(heads=2, kv_heads=2, head_dim=24, window=1),
    "group20": Layer(heads=20, kv_heads=1, head_dim=32, window=300),
}
HEAD_80: Final = {
    name: attrs.evolve(layer, heads=3, kv_heads=3, head_dim=80, block_size=48)
    for name, layer in FORMATS.items()
}
LENGTHS: Final = [1, 40, SEGMENT + 77, 2 * SEGMENT + 40]


@pytest.fixture(scope="module", params=available_tiers())
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=FORMATS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return FORMATS[request.param]


@pytest.mark.parametrize(
    "layer",
    [pytest.param(layer, id=name) for name, layer in SHAPES.items()]
    + [pytest.param(layer, id=f"head80-{name}") for name, layer in HEAD_80.items()],
)
def test_ragged_batches_match_the_reference(tier: str, layer: Layer) -> None:
    """Prompts whole and in chunks, single tokens, and both together, over one and several segments."""
    cache = Cache(tier, layer, [sequence(layer, length, seed) for seed, length in enumerate(LENGTHS)])
    cache.check([Chunk(0, 0, 1), Chunk(1, 0, 16), Chunk(2, 0, 331)])
    cache.check([Chunk(3, 0, 505), Chunk(2, 331, 332), Chunk(1, 16, 39)], threads=2)
    cache.check([Chunk(2, 332, 333), Chunk(3, 505, 506), Chunk(1, 39, 40)])
    cache.check([Chunk(3, 506, 552)], threads=3)


def test_more_heads_of_a_group_than_rows_of_a_task(tier: str, layer: Layer) -> None:
    layer = attrs.evolve(layer, heads=200, kv_heads=1, head_dim=32)
    cache = Cache(tier, layer, [sequence(layer, 20, seed=9)])
    cache.check([Chunk(0, 0, 19)], threads=2)
    cache.check([Chunk(0, 19, 20)])


@pytest.mark.parametrize(
    "layer",
    [pytest.param(SHAPES[name], id=name) for name in ("gemma3", "group20")]
    + [pytest.param(layer, id=f"head80-{name}") for name, layer in HEAD_80.items()],
)
def test_outputs_are_bit_equal_however_they_are_computed(tier: str, layer: Layer) -> None:
    length = 2 * SEGMENT + 50
    sequences = [sequence(layer, length, seed=1), sequence(layer, 300, seed=2)]
    whole = Cache(tier, layer, sequences).attend([Chunk(0, 0, length)])[0]

    ends = [1, 2, 17, 33, 100, SEGMENT - 1, SEGMENT + 1, 430, 432, length - 2, length - 1, length]
    cache = Cache(tier, layer, sequences)
    parts = []
    for threads, (first, end) in enumerate(itertools.pairwise([0, *ends]), 1):
        # Beside a chunk of another sequence, before or behind it.
        mates = [Chunk(1, 20 * threads, 20 * threads + 20), Chunk(0, first, end)]
        if threads % 2:
            parts.append(cache.attend(mates, threads=1 + threads % 4)[1])
        else:
            parts.append(cache.attend(mates[::-1], threads=1 + threads % 4)[0])
    assert bits(torch.cat(parts)) == bits(whole)


@pytest.mark.parametrize("window", [0, 700])
def test_a_sequence_that_threads_share_gets_the_same_bits(tier: str, window: int) -> None:
    layer = Layer(window=window, heads=2, kv_heads=1)
    length = 4 * SEGMENT + 9
    cache = Cache(tier, layer, [sequence(layer, length, seed=3)])
    cache.attend([Chunk(0, 0, length - 2)])
    last = [Chunk(0, length - 2, length)]
    alone = cache.attend(last)[0]
    assert cache.splits == 0
    for threads in (2, 3, 5, 7):
        assert bits(cache.attend(last, threads)[0]) == bits(alone)
        assert cache.splits == 1


def test_what_a_block_held_before_does_not_matter(tier: str, layer: Layer) -> None:
    sequences = [sequence(layer, 90, seed=4), sequence(layer, 90, seed=5)]
    fresh = Cache(tier, layer, sequences[:1])
    reused = Cache(tier, layer, sequences)
    reused.attend([Chunk(1, 0, 90)])
    reused.blocks[0] = reused.blocks[1].flip(0)
    for chunk in (Chunk(0, 0, 70), Chunk(0, 70, 71), Chunk(0, 71, 90)):
        assert bits(reused.attend([chunk])[0]) == bits(fresh.attend([chunk])[0])


def test_a_row_that_is_not_a_number_leaves_the_others_alone(tier: str, layer: Layer) -> None:
    healthy = sequence(layer, 40, seed=6)
    ill = attrs.evolve(healthy, queries=healthy.queries.clone())
    ill.queries[3] = torch.nan
    one, other = (Cache(tier, layer, [each]).attend([Chunk(0, 0, 40)])[0] for each in (healthy, ill))
    assert other[3].isnan().all()
    rest = torch.arange(40) != 3
    assert bits(other[rest]) == bits(one[rest])


def test_numbers_that_are_seen_and_not_numbers_are_not_hidden(tier: str, layer: Layer) -> None:
    healthy = sequence(layer, 40, seed=6)
    ill = attrs.evolve(healthy, keys=healthy.keys.clone())
    ill.keys[30] = torch.nan
    output = Cache(tier, layer, [ill]).attend([Chunk(0, 0, 40)])[0]
    assert output[30:].isnan().all()
    assert output[:30].isfinite().all()


def test_only_the_layers_own_pages_are_written(tier: str, layer: Layer) -> None:
    cache = Cache(tier, layer, [sequence(layer, 40, seed=8)])
    cache.attend([Chunk(0, 0, 40)])
    places = cache.pool.view(len(cache.pool), cache.PLACES, -1)
    written = (places != 0xFF).any(-1)
    assert not written[:, [0, 2]].any()
    assert sorted(torch.nonzero(written[:, 1]).flatten().tolist()) == sorted(cache.blocks[0, :3].tolist())
