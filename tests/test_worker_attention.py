"""The torch backend against the definition of paged attention; its memory; its row order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from helpers_worker import TINY_LLAMA, scheduled_sequence
from trioserve.models.config import llama_config
from trioserve.worker.attention import TorchAttention
from trioserve_kernels.reference import paged_attention

if TYPE_CHECKING:
    from trioserve.worker.batch import ScheduledSequence

BLOCK_SIZE = 4
NUM_BLOCKS = 3000

# (tokens cached before, new tokens)
BATCHES = {
    "one token": [(0, 1)],
    "decodes": [(3, 1), (4, 1), (70, 1), (7, 1), (5, 1)],
    "decodes of very different length": [(2, 1), (3000, 1), (1, 1), (800, 1), (9, 1), (2999, 1)],
    "prefill": [(0, 13)],
    "chunks": [(5, 6), (0, 4), (8, 8), (31, 2)],
    "mixed": [(0, 9), (12, 1), (6, 5), (0, 1), (40, 1)],
}


def _sequences(shape: list[tuple[int, int]]) -> list[ScheduledSequence]:
    free = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences = []
    for start, num_new in shape:
        table = [free.pop() for _ in range(-(-(start + num_new) // BLOCK_SIZE))]
        sequences.append(scheduled_sequence(start=start, token_ids=[0] * num_new, block_table=table))
    return sequences


def _reference(
    query: torch.Tensor, cache: torch.Tensor, sequences: list[ScheduledSequence], scale: float
) -> torch.Tensor:
    width = max(len(s.block_table) for s in sequences)
    starts = [0]
    for s in sequences:
        starts.append(starts[-1] + len(s.token_ids))
    return paged_attention(
        query,
        cache[0],
        cache[1],
        block_tables=torch.tensor([[*s.block_table, *[0] * (width - len(s.block_table))] for s in sequences]),
        query_starts=torch.tensor(starts),
        sequence_lengths=torch.tensor([s.start + len(s.token_ids) for s in sequences]),
        scale=scale,
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_equals_the_definition(batch: str, dtype: torch.dtype, tolerance: float, num_kv_heads: int) -> None:
    config = llama_config(TINY_LLAMA | {"num_key_value_heads": num_kv_heads})
    backend = TorchAttention(config, BLOCK_SIZE, dtype)
    cache = backend.allocate(NUM_BLOCKS)[0]
    torch.manual_seed(0)
    cache.copy_(torch.randn(cache.shape))
    unsorted = _sequences(BATCHES[batch])
    sequences = [unsorted[index] for index in backend.arrange(unsorted)]
    num_tokens = sum(len(s.token_ids) for s in sequences)
    query = torch.randn(num_tokens, config.num_heads, config.head_dim).to(dtype)
    key, value = torch.randn(2, num_tokens, num_kv_heads, config.head_dim).to(dtype)
    result = backend.plan(sequences).attend(query, key, value, cache)
    assert result.dtype is dtype
    # The reference reads the new keys from the cache: it fails too if they were not written to their place.
    expected = _reference(query, cache, sequences, config.attention_scale)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def test_new_keys_and_values_land_in_their_slots() -> None:
    backend = TorchAttention(llama_config(TINY_LLAMA), BLOCK_SIZE, torch.float32)
    cache = backend.allocate(8)[0]
    sequence = scheduled_sequence(start=3, token_ids=[0] * 6, block_table=[6, 1, 4])
    key, value = torch.randn(2, 6, 2, 8)
    backend.plan([sequence]).attend(torch.randn(6, 4, 8), key, value, cache)
    for i, (block, offset) in enumerate([(6, 3), (1, 0), (1, 1), (1, 2), (1, 3), (4, 0)]):
        assert torch.equal(cache[0, block, offset], key[i])
        assert torch.equal(cache[1, block, offset], value[i])
    assert torch.count_nonzero(cache.abs().sum((-1, -2))) == 2 * 6


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Padding, grouping and neighbours change no bit of a decode row's result."""
    config = llama_config(TINY_LLAMA)
    backend = TorchAttention(config, BLOCK_SIZE, torch.float32)
    cache = backend.allocate(NUM_BLOCKS)[0]
    cache.copy_(torch.randn(cache.shape))
    unsorted = _sequences(BATCHES["decodes of very different length"])
    sequences = [unsorted[index] for index in backend.arrange(unsorted)]
    query = torch.randn(6, config.num_heads, config.head_dim)
    key, value = torch.randn(2, 6, config.num_kv_heads, config.head_dim)
    together = backend.plan(sequences).attend(query, key, value, cache)
    for i, sequence in enumerate(sequences):
        alone = backend.plan([sequence]).attend(query[i : i + 1], key[i : i + 1], value[i : i + 1], cache)
        torch.testing.assert_close(alone[0], together[i], atol=1e-6, rtol=0)


def test_a_big_cache_takes_no_memory_until_it_is_written() -> None:
    backend = TorchAttention(llama_config(TINY_LLAMA), BLOCK_SIZE, torch.bfloat16)
    num_blocks = 2**30 // backend.bytes_per_block
    before = _resident_bytes()
    caches = backend.allocate(num_blocks)
    assert sum(cache.nbytes for cache in caches) == num_blocks * backend.bytes_per_block
    assert _resident_bytes() - before < 2**26
    assert not caches[0][:, num_blocks // 2].any()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
