"""The torch backend against the definition of paged attention; its memory; its row order."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from helpers_worker import TINY_GEMMA3, TINY_LLAMA, scheduled_sequence
from trioserve.models.config_gemma3 import gemma3_config
from trioserve.models.config_llama import llama_config
from trioserve.models.config_qwen2 import qwen2_config
from trioserve.worker.attention import TorchAttention
from trioserve.worker.layer_groups import group_layers
from trioserve_kernels.reference import paged_attention

if TYPE_CHECKING:
    from trioserve.models.config import DecoderConfig
    from trioserve.worker.batch import ScheduledSequence

BLOCK_SIZE = 4
NUM_BLOCKS = 3000

# (tokens cached before, new tokens)
BATCHES = {
    "one token": [(0, 1)],
    "decodes": [(3, 1), (4, 1), (70, 1), (7, 1), (5, 1)],
    "decodes of very different length": [(2, 1), (3000, 1), (1, 1), (800, 1), (9, 1), (2999, 1)],
    "drafts, all of a length": [(9, 6), (40, 6), (3, 6)],
    "drafts of several lengths": [(9, 6), (40, 2), (3, 4), (0, 3), (900, 9), (17, 16)],
    "prefill": [(0, 23)],
    "chunks": [(5, 26), (0, 17), (8, 18), (31, 20)],
    "chunks longer than what is cut": [(0, 1100), (3, 700)],
    "mixed": [(0, 29), (12, 1), (6, 5), (0, 1), (40, 1), (33, 3), (7, 40)],
}


def windowed(num_kv_heads: int, window: int | None) -> DecoderConfig:
    """One group of layers, all of which see `window` tokens back."""
    sliding = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
    return qwen2_config(TINY_LLAMA | {"num_key_value_heads": num_kv_heads} | sliding)


def sequences_of(shape: list[tuple[int, int]], window: int | None = None) -> list[ScheduledSequence]:
    """Tables in random order; -1 for the pages that the window leaves out."""
    free = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences = []
    for start, num_new in shape:
        unseen = 0 if window is None else max(0, start - window + 1) // BLOCK_SIZE
        table = [-1] * unseen
        table += [free.pop() for _ in range(-(-(start + num_new) // BLOCK_SIZE) - unseen)]
        sequences.append(scheduled_sequence(start=start, token_ids=[0] * num_new, block_tables=[table]))
    return sequences


def by_definition(
    query: torch.Tensor,
    cache: torch.Tensor,
    sequences: list[ScheduledSequence],
    config: DecoderConfig,
) -> torch.Tensor:
    tables = [s.block_tables[0] for s in sequences]
    width = max(map(len, tables))
    starts = [0]
    for s in sequences:
        starts.append(starts[-1] + len(s.token_ids))
    return paged_attention(
        query,
        cache[0],
        cache[1],
        block_tables=torch.tensor([[*table, *[-1] * (width - len(table))] for table in tables]),
        query_starts=torch.tensor(starts),
        sequence_lengths=torch.tensor([s.start + len(s.token_ids) for s in sequences]),
        scale=config.attention_scale,
        window=config.layers[0].window,
    )


def filled_cache(backend: TorchAttention, sequences: list[ScheduledSequence]) -> torch.Tensor:
    """Random numbers in the blocks of the tables, NaN in all others: whatever reads them shows."""
    cache = backend.allocate(NUM_BLOCKS)[0]
    cache.fill_(torch.nan)
    held = torch.tensor([b for s in sequences for b in s.block_tables[0] if b >= 0])
    cache[:, held] = torch.randn(2, len(held), *cache.shape[2:]).to(cache.dtype)
    return cache


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 10, 64])
def test_equals_the_definition(
    batch: str, dtype: torch.dtype, tolerance: float, num_kv_heads: int, window: int | None
) -> None:
    config = windowed(num_kv_heads, window)
    backend = TorchAttention(config, BLOCK_SIZE, dtype)
    unsorted = sequences_of(BATCHES[batch], window)
    sequences = [unsorted[index] for index in backend.arrange(unsorted)]
    torch.manual_seed(0)
    cache = filled_cache(backend, sequences)
    num_tokens = sum(len(s.token_ids) for s in sequences)
    query = torch.randn(num_tokens, config.num_heads, config.head_dim).to(dtype)
    key, value = torch.randn(2, num_tokens, num_kv_heads, config.head_dim).to(dtype)
    result = backend.plan(sequences).attend(0, query, key, value, cache)
    assert result.dtype is dtype
    # The reference reads the new keys from the cache: it fails too if they were not written to their place.
    expected = by_definition(query, cache, sequences, config)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def test_new_keys_and_values_land_in_their_slots() -> None:
    backend = TorchAttention(llama_config(TINY_LLAMA), BLOCK_SIZE, torch.float32)
    cache = backend.allocate(8)[0]
    sequence = scheduled_sequence(start=3, token_ids=[0] * 6, block_tables=[[6, 1, 4]])
    key, value = torch.randn(2, 6, 2, 8)
    backend.plan([sequence]).attend(0, torch.randn(6, 4, 8), key, value, cache)
    for i, (block, offset) in enumerate([(6, 3), (1, 0), (1, 1), (1, 2), (1, 3), (4, 0)]):
        assert torch.equal(cache[0, block, offset], key[i])
        assert torch.equal(cache[1, block, offset], value[i])
    assert torch.count_nonzero(cache.abs().sum((-1, -2))) == 2 * 6


@pytest.mark.parametrize("batch", ["decodes of very different length", "drafts of several lengths"])
@pytest.mark.parametrize("window", [None, 10])
def test_a_row_does_not_depend_on_its_batch(batch: str, window: int | None) -> None:
    """Padding, grouping and neighbours change nothing but the last bits of a row's result."""
    config = windowed(2, window)
    backend = TorchAttention(config, BLOCK_SIZE, torch.float32)
    unsorted = sequences_of(BATCHES[batch], window)
    sequences = [unsorted[index] for index in backend.arrange(unsorted)]
    cache = filled_cache(backend, sequences)
    counts = [len(s.token_ids) for s in sequences]
    query = torch.randn(sum(counts), config.num_heads, config.head_dim)
    key, value = torch.randn(2, sum(counts), config.num_kv_heads, config.head_dim)
    together = backend.plan(sequences).attend(0, query, key, value, cache)
    parts = zip(sequences, *(x.split(counts) for x in (together, query, key, value)), strict=True)
    for sequence, expected, *own in parts:
        alone = backend.plan([sequence]).attend(0, *own, cache)
        torch.testing.assert_close(alone, expected, atol=1e-6, rtol=0)


# Groups of layers


def test_each_layer_uses_its_own_groups_table() -> None:
    """Layers at the same place in different groups share memory, and keep out of each other's blocks."""
    config = gemma3_config(TINY_GEMMA3)  # layers 2 and 5 see everything; groups of 2, the last half filled
    backend = TorchAttention(config, BLOCK_SIZE, torch.float32)
    assert backend.layout.windows == (None, 10, 10, 10)
    caches = backend.allocate(8)
    sequence = scheduled_sequence(start=0, token_ids=[0] * 4, block_tables=[[3], [0], [6], [5]])
    plan = backend.plan([sequence])
    new = {}
    for layer, cache in enumerate(caches):
        key, value = torch.randn(2, 4, config.num_kv_heads, config.head_dim)
        plan.attend(layer, torch.randn(4, config.num_heads, config.head_dim), key, value, cache)
        new[layer] = key
    blocks = {0: 0, 1: 0, 2: 3, 3: 6, 4: 6, 5: 3, 6: 5}
    for layer, block in blocks.items():
        assert torch.equal(caches[layer][0, block], new[layer]), layer
    assert len({cache.data_ptr() for cache in caches}) == 2


@pytest.mark.parametrize(
    ("counts", "groups", "size"),
    [
        ({None: 30}, 1, 30),
        ({512: 5}, 1, 5),
        ({None: 3, 512: 15}, 6, 3),  # Gemma 3 270M
        ({None: 4, 512: 22}, 7, 4),  # 1B: two places stay empty
        ({None: 5, 1024: 29}, 7, 5),  # 4B: one
        ({None: 21, 4096: 7}, 4, 7),
    ],
)
def test_groups_are_of_equal_size_and_few(counts: dict[int | None, int], groups: int, size: int) -> None:
    windows = [window for window, count in counts.items() for _ in range(count)]
    random.Random(0).shuffle(windows)
    found = group_layers(windows)
    assert (len(found.windows), found.size) == (groups, size)
    assert len(set(found.places)) == len(windows)
    for window, (group, place) in zip(windows, found.places, strict=True):
        assert found.windows[group] == window
        assert place < size
    assert list(found.windows) == sorted(found.windows, key=lambda window: window is not None)


# Memory


def test_a_block_holds_the_layers_of_one_group() -> None:
    config = gemma3_config(TINY_GEMMA3)
    backend = TorchAttention(config, BLOCK_SIZE, torch.bfloat16)
    assert backend.bytes_per_block == 2 * 2 * BLOCK_SIZE * config.num_kv_heads * config.head_dim * 2


def test_a_big_cache_takes_no_memory_until_it_is_written() -> None:
    backend = TorchAttention(gemma3_config(TINY_GEMMA3), BLOCK_SIZE, torch.bfloat16)
    num_blocks = 2**30 // backend.bytes_per_block
    held = _fill_the_heap_and_free_it()
    before = _resident_bytes()
    caches = backend.allocate(num_blocks)
    memory = {cache.data_ptr(): cache.nbytes for cache in caches}
    assert sum(memory.values()) == num_blocks * backend.bytes_per_block
    assert _resident_bytes() - before < 2**26
    assert not caches[0][:, num_blocks // 2].any()
    del held


def _fill_the_heap_and_free_it() -> np.ndarray:
    """There is half a GiB in one piece that the C library hands out again: below what is returned, at the end
    of its heap. Its pages are the system's again."""
    np.ones(2**25 - 2**16, np.uint8)  # freed at once: from now on arrays of as much are in the heap
    pieces = [np.ones(2**24, np.uint8) for _ in range(40)]
    last = np.ones(2**23, np.uint8)
    del pieces
    ctypes.CDLL(None).malloc_trim(0)
    return last


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
