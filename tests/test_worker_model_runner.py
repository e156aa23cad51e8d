"""Steps as a scheduler sees them: which sequences get a token, in which order, with which threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from helpers_worker import DrivenSequence, engine_config, resolved, run_step, tiny_llama
from trioserve.errors import ModelSourceError
from trioserve.sampling_params import SamplingParams
from trioserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(directory)
    return directory


@pytest.fixture
def runner(directory: Path) -> ModelRunner:
    runner = ModelRunner(resolved(directory), engine_config())
    runner.allocate_kv_cache(32)
    return runner


def test_bytes_per_block(directory: Path) -> None:
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        runner = ModelRunner(resolved(directory, dtype=dtype), engine_config(block_size=16))
        # 2 layers, keys and values, 16 tokens, 2 key-value heads of 8 numbers
        assert runner.bytes_per_block == 2 * 2 * 16 * 2 * 8 * itemsize


def test_it_computes_with_the_threads_it_was_given(directory: Path) -> None:
    before = torch.get_num_threads()
    try:
        ModelRunner(resolved(directory), engine_config(threads=2))
        assert torch.get_num_threads() == 2
        ModelRunner(resolved(directory), engine_config(threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"config\.json"):
        ModelRunner(resolved(tmp_path), engine_config())


def test_results_come_in_the_batchs_order(runner: ModelRunner) -> None:
    """Prefills, decodes and unfinished chunks mixed: the runner sorts its rows, and nobody sees it."""

    def sequences() -> list[DrivenSequence]:
        prompts = ([5, 6, 7, 8, 9], [50], [10, 11, 12], [90, 91], [33])
        return [DrivenSequence(prompt=p, blocks=[4 * i, 4 * i + 1]) for i, p in enumerate(prompts)]

    alone = sequences()
    for sequence in alone:
        run_step(runner, [(sequence, 9)])
        run_step(runner, [(sequence, 9)])
    long, short, middle, cut, last = together = sequences()
    run_step(runner, [(long, 9), (short, 9), (cut, 1), (last, 9)])
    assert [len(s.output) for s in together] == [1, 1, 0, 0, 1]
    tokens = run_step(runner, [(middle, 9), (last, 9), (cut, 9), (long, 9), (short, 9)])
    assert [t.token_id for t in tokens] == [s.output[-1] for s in (middle, last, cut, long, short)]
    run_step(runner, [(cut, 9), (middle, 9)])
    assert [s.output for s in together] == [s.output for s in alone]


def test_a_step_in_which_nothing_samples(runner: ModelRunner) -> None:
    sequence = DrivenSequence(prompt=[3, 4, 5, 6], blocks=[0])
    assert run_step(runner, [(sequence, 3)]) == []
    assert len(run_step(runner, [(sequence, 1)])) == 1


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=2)

    def seeded() -> DrivenSequence:
        return DrivenSequence(prompt=[3, 4, 5], blocks=[0, 1, 2, 3], params=params, seed=42)

    alone, batched = seeded(), seeded()
    for _ in range(10):
        run_step(runner, [(alone, 3)])
    other = DrivenSequence(prompt=[9], blocks=[8, 9, 10, 11], params=params, seed=43)
    for _ in range(10):
        run_step(runner, [(other, 1), (batched, 3)])
    assert batched.output == alone.output
    assert len(set(alone.output)) > 3
