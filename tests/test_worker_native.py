"""The native kernels against transformers and our torch models, and against themselves, on every tier."""

from __future__ import annotations

import random
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

from helpers_decoders import CHUNKS, PROMPT, VARIANTS, Tiny, expected_logits, logits_of, save
from helpers_native import TIERS, NativeModel, on_every_tier, put_in_blocks
from helpers_worker import PagedModel, tiny_gemma3, tiny_llama, tiny_qwen2

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.config import ResolvedModel

pytestmark = pytest.mark.skipif(not TIERS, reason="no native kernels were built")

BIASES = {"attention_bias": True, "mlp_bias": True}
ODD: dict[str, tuple[Tiny, dict[str, Any]]] = {
    "llama, odd sizes": (
        tiny_llama,
        {
            "hidden_size": 44,
            "head_dim": 80,
            "intermediate_size": 77,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen2, heads of 96": (tiny_qwen2, {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 96}),
    "gemma3, heads of 256": (tiny_gemma3, {"head_dim": 256, "num_key_value_heads": 1}),
    "llama, wide": (
        tiny_llama,
        {"hidden_size": 640, "intermediate_size": 1000, "head_dim": 128, "initializer_range": 0.05},
    ),
}
KINDS_OF_BLOCKS = {
    "Q8_0": dict.fromkeys(["proj", "embed_tokens"], "Q8_0"),
    "Q4_1": {"proj": "Q4_1", "embed_tokens": "Q8_0"},
    "Q4_0": {"proj": "Q4_0", "embed_tokens": "Q8_0"},
    "Q4_K": {"proj": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K"},
    "gate beside another kind": {"gate_proj": "Q4_K", "up_proj": "Q6_K"},
}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,  # wide models with larger weights double each small difference
}
"""Rows of whole blocks, of every kind."""


@pytest.mark.parametrize(("tiny", "changes"), (VARIANTS | ODD).values(), ids=VARIANTS | ODD)
def test_float32_logits_are_those_of_transformers(
    tiny: Tiny, changes: dict[str, Any], tmp_path: Path
) -> None:
    theirs = tiny(**changes)
    expected = expected_logits(theirs, PROMPT)
    for tier, native in on_every_tier(save(theirs, tmp_path)):
        for chunks in CHUNKS.values():
            ours = logits_of(native, PROMPT, chunks)
            _check_close(ours, expected, tier)


def _check_close(ours: torch.Tensor, expected: torch.Tensor, tier: str) -> None:
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4, msg=lambda text: f"{tier}: {text}")


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_qwen2, tiny_gemma3])
def test_bfloat16_stays_close_to_float32(tiny: Tiny, tmp_path: Path) -> None:
    theirs = tiny()
    expected = expected_logits(theirs, PROMPT)
    for tier, native in on_every_tier(save(theirs, tmp_path, dtype="bfloat16")):
        ours = logits_of(native, PROMPT, [40, 1, 6, 13])
        assert torch.cosine_similarity(ours, expected).min() > 0.998, tier


def _blocks_model(kind: str, directory: Path) -> ResolvedModel:
    model = save(tiny_llama(**WIDE), directory, dtype="bfloat16")
    put_in_blocks(directory, KINDS_OF_BLOCKS[kind])
    return model


@pytest.mark.parametrize("kind", KINDS_OF_BLOCKS)
def test_blocks_are_served_as_they_are(kind: str, tmp_path: Path) -> None:
    """Against torch in float32, with the numbers that the blocks stand for."""
    model = _blocks_model(kind, tmp_path)
    in_float32 = attrs.evolve(model, dtype="float32")
    expected = logits_of(PagedModel(in_float32), PROMPT, [60])
    for tier, native in on_every_tier(model):
        ours = logits_of(native, PROMPT, [60])
        assert torch.cosine_similarity(ours, expected).mean() > 0.995, tier
    for tier, native in on_every_tier(in_float32):
        ours = logits_of(native, PROMPT, [60])
        _check_close(ours, expected, tier)


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.99), ("int4", 0.85)])
def test_quantized_as_it_is_loaded(quantization: Any, least: float, tmp_path: Path) -> None:
    theirs = tiny_llama(**WIDE)
    expected = expected_logits(theirs, PROMPT)
    model = attrs.evolve(save(theirs, tmp_path, dtype="bfloat16"), quantization=quantization)
    sizes = []
    for tier, native in on_every_tier(model):
        ours = logits_of(native, PROMPT, [60])
        assert torch.cosine_similarity(ours, expected).mean() > least, tier
        sizes.append(ours.numel())
    assert sizes


def test_an_int8_cache_holds_twice_as_much(tmp_path: Path) -> None:
    theirs = tiny_llama(**WIDE)
    expected = expected_logits(theirs, PROMPT)
    model = save(theirs, tmp_path, dtype="bfloat16")
    for tier in TIERS:
        with closing(NativeModel(model, tier)) as plain:
            as_the_model = plain.executor.bytes_per_block
        with closing(NativeModel(model, tier, kv_cache_dtype="int8")) as native:
            assert native.executor.bytes_per_block < 0.6 * as_the_model
            ours = logits_of(native, PROMPT, [40, 1, 6, 13])
        assert torch.cosine_similarity(ours, expected).mean() > 0.995, tier


FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "Q4_K": {"blocks": "Q4_K"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_equal_bit_for_bit_however_the_work_is_cut(name: str, tiny: Tiny, tmp_path: Path) -> None:
    changes = dict(FORMATS[name])
    kind = changes.pop("blocks", None)
    model = save(tiny(**WIDE), tmp_path, dtype=changes.pop("dtype", "bfloat16"))
    if kind is not None:
        put_in_blocks(tmp_path, KINDS_OF_BLOCKS[kind])
    model = attrs.evolve(model, quantization=changes.pop("quantization", "auto"))
    rng = random.Random(4)
    prompt = rng.choices(range(101), k=120)
    chunkings = [[80, *[1] * 40], [16] * 7 + [8], _random_chunks(rng, 120)]
    for tier, native in on_every_tier(model, num_blocks=1000, **changes):
        whole = logits_of(native, prompt, [120])
        assert whole.isfinite().all()
        for chunks in chunkings:
            assert torch.equal(logits_of(native, prompt, chunks), whole), (tier, chunks)
        assert torch.equal(_among_others(native, prompt, rng), whole), tier
        assert torch.equal(_behind_a_known_prefix(native, prompt), whole[96:]), tier


def _random_chunks(rng: random.Random, total: int) -> list[int]:
    cuts = sorted({0, total, *rng.sample(range(1, total), k=9)})
    return [end - start for start, end in pairwise(cuts)]


def _among_others(native: NativeModel, prompt: list[int], rng: random.Random) -> torch.Tensor:
    """In steps with one to forty other sequences, at changing places."""
    sequence = native.new_sequence(prompt)
    parts = []
    for size in _random_chunks(rng, len(prompt)):
        others = [
            native.new_sequence(rng.choices(range(101), k=rng.randint(1, 9)))
            for _ in range(rng.choice([1, 3, 20]))
        ]
        step = [(sequence, size), *((other, 9) for other in others)]
        rng.shuffle(step)
        parts.append(native.step(step)[[s for s, _ in step].index(sequence)])
        native.give_back(others)
    return torch.cat(parts)


def _behind_a_known_prefix(native: NativeModel, prompt: list[int]) -> torch.Tensor:
    first = native.new_sequence(prompt)
    native.step([(first, len(prompt))])
    second = native.new_sequence(prompt)
    for table, known in zip(second.block_tables, first.block_tables, strict=True):
        table.extend(known[:6])
    second.start = 96
    (logits,) = native.step([(second, 24)])
    return logits


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_nothing(num_threads: int, tmp_path: Path) -> None:
    model = save(tiny_gemma3(), tmp_path, dtype="bfloat16")
    for tier in TIERS:
        with closing(NativeModel(model, tier)) as one:
            expected = logits_of(one, PROMPT, [60])
        with closing(NativeModel(model, tier, threads=num_threads)) as native:
            assert torch.equal(logits_of(native, PROMPT, [60]), expected), tier
