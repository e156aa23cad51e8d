"""The native Llama against transformers' on the same random weights, through the whole worker."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from helpers_worker import BLOCK_SIZE, DrivenSequence, engine_config, resolved, run_step, tiny_llama
from trioserve.model_sources import SilentProgress, resolve_model
from trioserve.worker.attention import TorchAttention
from trioserve.worker.loader import load_model
from trioserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.config import DType

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one head per group": {"num_key_value_heads": 4},
    "one key-value head": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 10},
    "wide heads": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear positions": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    "llama3 positions": {"rope_parameters": LLAMA3},
}
PROMPT = random.Random(1).choices(range(101), k=50)
BLOCKS = [9, 3, 17, 4, 0, 12, 8, 1, 16, 2, 15, 11, 7, 6, 13]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[50], [1, 3, 17, 1, 1, 20, 7]], ids=["whole", "chunked"])
def test_logits_of_every_position(variant: str, chunks: list[int], tmp_path: Path) -> None:
    theirs = tiny_llama(**VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
        ours = _logits(tmp_path, chunks)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def _logits(directory: Path, chunks: list[int], dtype: DType = "float32") -> torch.Tensor:
    model = load_model(resolved(directory, dtype=dtype))
    backend = TorchAttention(model.config, BLOCK_SIZE, model.dtype)
    caches = backend.allocate(18)
    sequence = DrivenSequence(prompt=PROMPT, blocks=BLOCKS)
    logits = []
    for size in chunks:
        step = sequence.next_chunk(size)
        positions = torch.arange(step.start, step.start + size)
        hidden = model.forward(torch.tensor(step.token_ids), positions, backend.plan([step]), caches)
        logits.append(model.logits(hidden))
    return torch.cat(logits)


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    theirs = tiny_llama()
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
        ours = _logits(tmp_path, [30, 1, 19], "bfloat16")
    assert ours.dtype is torch.bfloat16
    assert torch.cosine_similarity(ours.float(), expected).min() > 0.999


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.LlamaForCausalLM, ModelRunner]:
    directory = tmp_path_factory.mktemp("tiny")
    theirs = tiny_llama()
    theirs.save_pretrained(directory)
    runner = ModelRunner(resolved(directory), engine_config())
    runner.allocate_kv_cache(200)
    return theirs, runner


def test_greedy_text_in_a_shuffled_batch_is_that_of_transformers_alone(
    tiny: tuple[transformers.LlamaForCausalLM, ModelRunner],
) -> None:
    theirs, runner = tiny
    rng = random.Random(2)
    blocks = rng.sample(range(200), 200)
    sequences = [
        DrivenSequence(prompt=rng.choices(range(101), k=rng.randint(1, 40)), blocks=blocks[i * 20 :][:20])
        for i in range(10)
    ]
    for step in range(60):  # sequence i arrives at step 2 i; chunks of all sizes; others decode meanwhile
        running = [s for i, s in enumerate(sequences) if 2 * i <= step and len(s.output) < 16]
        rng.shuffle(running)
        if running:
            run_step(runner, [(sequence, rng.choice([1, 5, 40])) for sequence in running])
    for sequence in sequences:
        assert sequence.output == _generate(theirs, sequence.prompt, 16)


def _generate(model: transformers.LlamaForCausalLM, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_cached_prefix_is_used_as_it_lies(
    tiny: tuple[transformers.LlamaForCausalLM, ModelRunner],
) -> None:
    theirs, runner = tiny
    first = DrivenSequence(prompt=PROMPT, blocks=BLOCKS)
    run_step(runner, [(first, 50)])
    shared = 8 * BLOCK_SIZE
    other = [*PROMPT[:shared], 5, 6, 7]
    second = DrivenSequence(prompt=other, blocks=[*BLOCKS[:8], 100, 101, 102], start=shared)
    for _ in range(8):
        run_step(runner, [(second, 3), (first, 1)])
    assert second.output == _generate(theirs, other, 8)
    assert first.output == _generate(theirs, PROMPT, 9)


def test_the_default_model_answers_as_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would stay
    config = engine_config(model="smollm2-135m", dtype="float32", block_size=16)
    model = resolve_model(config.model, SilentProgress())
    runner = ModelRunner(model, config)
    runner.allocate_kv_cache(8)
    prompt = [1, 504, 3575, 282, 4649, 314]  # "<|im_start|>The capital of France is"
    sequence = DrivenSequence(prompt=prompt, blocks=[5, 2])
    for _ in range(6):
        run_step(runner, [(sequence, 6)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    assert sequence.output == _generate(theirs, prompt, 6)
