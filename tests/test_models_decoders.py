"""The native decoders against transformers' on the same random weights, through paged attention in chunks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from helpers_decoders import CHUNKS, PROMPT, VARIANTS, WINDOWS_FROM_1, Tiny, expected_logits, logits_of, save
from helpers_worker import BLOCK_SIZE, PagedModel, tiny_gemma3, tiny_llama, tiny_qwen2

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize(("tiny", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_logits_of_every_position(
    tiny: Tiny, changes: dict[str, Any], chunks: list[int], tmp_path: Path
) -> None:
    theirs = tiny(**changes)
    ours = logits_of(PagedModel(save(theirs, tmp_path)), PROMPT, chunks)
    torch.testing.assert_close(ours, expected_logits(theirs, PROMPT), atol=1e-4, rtol=1e-4)


def test_a_cached_prefix_is_used_as_it_lies(tmp_path: Path) -> None:
    theirs = tiny_llama()
    paged = PagedModel(save(theirs, tmp_path))
    first = paged.new_sequence(PROMPT)
    paged.step([(first, 60)])
    shared = 8 * BLOCK_SIZE
    second = paged.new_sequence([*PROMPT[:shared], 5, 6, 7])
    second.block_tables[0] += first.block_tables[0][:8]
    second.start = shared
    (ours,) = paged.step([(second, 3)])
    expected = expected_logits(theirs, second.prompt)[shared:]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_blocks_of_any_size(block_size: int, tmp_path: Path) -> None:
    theirs = tiny_gemma3()
    paged = PagedModel(save(theirs, tmp_path), block_size=block_size, num_blocks=400 // block_size + 8)
    ours = logits_of(paged, PROMPT, CHUNKS["chunked"])
    torch.testing.assert_close(ours, expected_logits(theirs, PROMPT), atol=1e-4, rtol=1e-4)


def test_a_chunk_far_longer_than_the_window(tmp_path: Path) -> None:
    theirs = tiny_gemma3(max_position_embeddings=1300)
    prompt = random.Random(2).choices(range(101), k=1300)
    ours = logits_of(PagedModel(save(theirs, tmp_path), num_blocks=1500), prompt, [1200, 100])
    torch.testing.assert_close(ours, expected_logits(theirs, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_qwen2, tiny_gemma3])
def test_bfloat16_stays_close_to_float32(tiny: Tiny, tmp_path: Path) -> None:
    theirs = tiny()
    ours = logits_of(PagedModel(save(theirs, tmp_path, dtype="bfloat16")), PROMPT, [40, 1, 6, 13])
    assert ours.dtype is torch.bfloat16
    expected = expected_logits(theirs, PROMPT)
    assert torch.cosine_similarity(ours.float(), expected).min() > 0.998


def test_bfloat16_scales_embeddings_as_transformers_does(tmp_path: Path) -> None:
    """The factor is rounded to bfloat16: sqrt(40) = 6.3246 becomes 6.3125."""
    changes = {"hidden_size": 40, "num_hidden_layers": 1, "sliding_window_pattern": 1}
    theirs = tiny_gemma3(**changes).bfloat16()
    paged = PagedModel(save(theirs, tmp_path, dtype="bfloat16"))
    token_ids = torch.arange(101)
    with torch.inference_mode():
        expected = theirs.model.embed_tokens(token_ids)
    assert torch.equal(paged.model._embedding(token_ids), expected)


@pytest.mark.parametrize(
    ("tiny", "changes"), [(tiny_llama, {}), (tiny_qwen2, WINDOWS_FROM_1), (tiny_gemma3, {})]
)
def test_greedy_text_in_a_shuffled_batch_is_that_of_transformers_alone(
    tiny: Tiny, changes: dict[str, Any], tmp_path: Path
) -> None:
    theirs = tiny(**changes)
    paged = PagedModel(save(theirs, tmp_path), num_blocks=500)
    rng = random.Random(2)
    sequences = [paged.new_sequence(rng.choices(range(101), k=rng.randint(1, 40))) for _ in range(8)]
    for step in range(60):  # sequence i arrives at step 2 i; chunks of all sizes; others decode meanwhile
        running = [s for i, s in enumerate(sequences) if 2 * i <= step and len(s.output) < 12]
        rng.shuffle(running)
        if running:
            paged.greedy([(sequence, rng.choice([1, 5, 40])) for sequence in running])
    for sequence in sequences:
        likeliest = expected_logits(theirs, sequence.prompt + sequence.output).argmax(-1).tolist()
        assert sequence.output == likeliest[len(sequence.prompt) - 1 : -1]
