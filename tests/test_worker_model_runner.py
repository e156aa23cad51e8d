"""Steps as a scheduler sees them: what each sequence gets, in which order, and what a runner holds."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from helpers_sampler import FakeGrammar, drawn
from helpers_worker import (
    BLOCK_SIZE,
    GREEDY,
    DrivenSequence,
    engine_config,
    resolved,
    run_step,
    scheduled_sequence,
    tiny_llama,
)
from trioserve.errors import ModelSourceError
from trioserve.sampling_params import SamplingParams
from trioserve.worker.batch import LogprobRow, StepBatch
from trioserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(directory)
    return directory


@pytest.fixture
def runner(directory: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(resolved(directory), engine_config())
    runner.allocate_kv_cache(32)
    yield runner
    runner.close()


def test_what_the_scheduler_needs_to_know(directory: Path) -> None:
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        runner = ModelRunner(resolved(directory, dtype=dtype), engine_config())
        # 2 layers, keys and values, 2 key-value heads of 8 numbers
        assert runner.bytes_per_block == 2 * 2 * BLOCK_SIZE * 2 * 8 * itemsize
        assert runner.layout.block_size == BLOCK_SIZE
        assert runner.layout.windows == (None,)


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
    outputs = run_step(runner, [(middle, 2), (last, 9), (cut, 9), (long, 9), (short, 9)])
    assert [drawn(o) for o in outputs] == [[], *(s.output[-1:] for s in (last, cut, long, short))]
    run_step(runner, [(middle, 9)])
    run_step(runner, [(cut, 9), (middle, 9)])
    assert [s.output for s in together] == [s.output for s in alone]


def test_a_step_in_which_nothing_samples(runner: ModelRunner) -> None:
    sequence = DrivenSequence(prompt=[3, 4, 5, 6], blocks=[0])
    [output] = run_step(runner, [(sequence, 3)])
    assert not output.tokens
    [output] = run_step(runner, [(sequence, 1)])
    assert len(output.tokens) == 1


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


def _log_softmax(model: Any, token_ids: list[int]) -> torch.Tensor:
    """By transformers: [len(token_ids), vocab], of what comes after each."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), -1)


def _check_row(row: LogprobRow, expected: torch.Tensor, token: int, num_top: int) -> None:
    assert row.token_ids[0] == token
    assert len(row.token_ids) == 1 + num_top
    found = torch.tensor(list(row.logprobs), dtype=torch.float64)
    torch.testing.assert_close(found, expected[list(row.token_ids)], atol=1e-3, rtol=0)
    torch.testing.assert_close(found[1:], expected.topk(num_top).values, atol=1e-3, rtol=0)
    likelier = (expected > expected[list(row.token_ids), None]).sum(-1)
    assert (torch.tensor(list(row.ranks)) - 1 - likelier).abs().max() <= 1  # fp32 may see a tie


def test_logprobs_are_those_of_transformers(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, logprobs=5, logprob_token_ids=(3, 4))
    sequence = DrivenSequence(prompt=[5, 6, 7], blocks=[0, 1, 2, 3], params=params, seed=1)
    rows = []
    for _ in range(6):
        [output] = run_step(runner, [(sequence, 3)])
        rows.append(output.tokens[0].logprobs)
    expected = _log_softmax(tiny_llama(), sequence.prompt + sequence.output)
    for position, row in enumerate(rows):
        assert row is not None
        assert list(row.token_ids[-2:]) == [3, 4]
        without_named = LogprobRow(row.token_ids[:-2], row.logprobs[:-2], row.ranks[:-2])
        _check_row(without_named, expected[position + 2], sequence.output[position], 5)
        assert abs(row.logprobs[-1] - expected[position + 2, 4]) < 1e-3


@pytest.mark.parametrize("num_top", [0, 7, -1])
@pytest.mark.parametrize("chunk", [7, 100])
def test_prompt_logprobs_are_those_of_transformers(runner: ModelRunner, num_top: int, chunk: int) -> None:
    """In chunks, beside a decode and another prompt; more rows than are computed at a time."""
    prompt = torch.randint(3, 101, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0.0, prompt_logprobs=num_top)
    rows: list[LogprobRow] = []
    other = DrivenSequence(prompt=[5, 6], blocks=[24, 25, 26, 27])
    for start in range(0, len(prompt), chunk):
        token_ids = prompt[start : start + chunk]
        ends = start + len(token_ids) == len(prompt)
        asking = scheduled_sequence(
            request_id=1, start=start, token_ids=token_ids, block_tables=[list(range(23))], samples=ends,
            params=params, prompt_token_ids=prompt, prompt_logprobs_start=1 + len(rows),
        )  # fmt: skip
        plain, output = runner.execute(StepBatch([other.next_chunk(1), asking]))
        other.output += drawn(plain)
        assert not plain.prompt_logprobs
        assert len(output.tokens) == ends
        rows += output.prompt_logprobs
    expected = _log_softmax(tiny_llama(), prompt)
    assert len(rows) == len(prompt) - 1
    for position, row in enumerate(rows, start=1):
        _check_row(row, expected[position - 1], prompt[position], 101 if num_top == -1 else num_top)


def test_prompt_logprobs_are_told_once(runner: ModelRunner) -> None:
    """A preempted sequence computes its prompt again, with output after it."""
    prompt = [5, 6, 7, 8, 9]
    again = scheduled_sequence(
        token_ids=[*prompt, 10, 11],
        block_tables=[[0, 1]],
        prompt_token_ids=prompt,
        output_token_ids=[10, 11],
        params=SamplingParams(temperature=0.0, prompt_logprobs=1),
        prompt_logprobs_start=3,
    )
    [output] = runner.execute(StepBatch([again]))
    assert [row.token_ids[0] for row in output.prompt_logprobs] == [8, 9]


_request_ids = itertools.count()


def _speculate(
    runner: ModelRunner, length: int, propose: Any, params: SamplingParams
) -> tuple[list[int], int]:
    """Through the KV cache: what a wrong draft wrote is overwritten by the next step."""
    request_id = next(_request_ids)
    prompt = [5, 6, 7]
    output: list[int] = []
    steps = start = 0
    while len(output) < length:
        drafts = propose(output)
        known = prompt + output
        sequence = scheduled_sequence(
            request_id=request_id,
            start=start,
            token_ids=[*known[start:], *drafts],
            num_drafts=len(drafts),
            params=params,
            seed=4,
            block_tables=[list(range(12))],
            prompt_token_ids=prompt,
            output_token_ids=list(output),
        )
        [result] = runner.execute(StepBatch([sequence]))
        start = len(known) + len(result.tokens) - 1
        output += drawn(result)
        steps += 1
    return output[:length], steps


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.3)]
)
def test_drafts_change_nothing_but_the_number_of_steps(runner: ModelRunner, params: SamplingParams) -> None:
    plain, _ = _speculate(runner, 20, lambda output: [], params)
    right, steps = _speculate(runner, 20, lambda output: plain[len(output) : len(output) + 4], params)
    assert (right, steps) == (plain, 4)
    wrong, steps = _speculate(runner, 20, lambda output: [(plain[len(output)] + 1) % 101, 7], params)
    assert (wrong, steps) == (plain, 20)
    half, steps = _speculate(runner, 20, lambda output: [plain[len(output)], 100, 100], params)
    assert half == plain
    assert 7 <= steps <= 11


def test_masks_are_made_in_a_thread_that_close_ends(runner: ModelRunner) -> None:
    before = threading.active_count()
    grammar = FakeGrammar([{7}, {8, 9}, {10}])
    plain = DrivenSequence(prompt=[5], blocks=[4])
    run_step(runner, [(plain, 1)])
    assert threading.active_count() == before
    constrained = scheduled_sequence(
        request_id=1,
        token_ids=[5, 7, 8],
        num_drafts=2,
        block_tables=[[0]],
        prompt_token_ids=[5],
        grammar=grammar,
    )
    _, output = runner.execute(StepBatch([plain.next_chunk(1), constrained]))
    assert drawn(output)[0] == 7
    assert grammar.taken == drawn(output)
    assert threading.active_count() == before + 1
    runner.close()
    runner.close()
    assert threading.active_count() == before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_sleeping_gives_memory_back(tmp_path: Path) -> None:
    tiny_llama(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_key_value_heads=4, head_dim=256
    ).save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").stat().st_size
    runner = ModelRunner(resolved(tmp_path), engine_config())
    num_blocks = 30_000_000 // runner.bytes_per_block
    runner.allocate_kv_cache(num_blocks)
    tables = [[*range(block, block + 30)] for block in range(0, num_blocks - 30, 30)]

    def use() -> list[int]:
        sequences = [DrivenSequence(prompt=list(range(3, 100)), blocks=table) for table in tables]
        run_step(runner, [(sequence, 97) for sequence in sequences])
        return [sequence.output[0] for sequence in sequences]

    tokens = use()
    awake = _resident_bytes()
    runner.free_kv_cache()
    cache = awake - _resident_bytes()
    assert cache > 20_000_000
    runner.free_weights()
    asleep = _resident_bytes()
    assert awake - cache - asleep > 0.8 * weights > 50_000_000
    runner.load_weights()
    runner.load_weights()
    runner.allocate_kv_cache(num_blocks)
    assert use() == tokens
    assert _resident_bytes() < awake + 0.2 * weights
