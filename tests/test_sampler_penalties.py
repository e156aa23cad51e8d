"""Penalties against their formulas in float64, also when the counts are kept from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from helpers_sampler import Array, ShapedLogits, random_logits, sample
from helpers_worker import GREEDY, scheduled_sequence
from trioserve.sampling_params import SamplingParams
from trioserve.worker.sampler import Sampler

if TYPE_CHECKING:
    from trioserve.worker.batch import ScheduledSequence

PENALTIES: dict[str, dict[str, float]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition that encourages": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.1},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.5},
}


def _penalised(logits: Array, params: SamplingParams, prompt: list[int], output: list[int]) -> Array:
    changed = logits.copy()
    for token in set(prompt + output):
        x = changed[token]
        changed[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token in set(output):
        changed[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return changed


def _sequence(
    index: int, params: SamplingParams, prompt: list[int], output: list[int], drafts: tuple[int, ...] = ()
) -> ScheduledSequence:
    return scheduled_sequence(
        request_id=index, params=params, prompt_token_ids=prompt, output_token_ids=output,
        token_ids=[0, *drafts], num_drafts=len(drafts),
    )  # fmt: skip


@pytest.mark.parametrize("name", PENALTIES)
def test_they_follow_their_formulas(name: str) -> None:
    params = SamplingParams(temperature=0.0, **PENALTIES[name])
    rng = np.random.default_rng(3)
    prompts, outputs = (
        [rng.integers(0, 12, rng.integers(0, 7)).tolist() for _ in range(100)] for _ in range(2)
    )
    logits = random_logits(100, 12, spread=1.0)
    rows = [_sequence(i, params, p, o) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]
    expected = [
        _penalised(row, params, p, o)
        for row, p, o in zip(logits.double().numpy(), prompts, outputs, strict=True)
    ]
    np.testing.assert_allclose(ShapedLogits(12)(logits, rows), expected, atol=1e-5)


@pytest.mark.parametrize("name", PENALTIES)
def test_through_steps_drafts_and_absences(name: str) -> None:
    """200 steps of one sampler over four requests that grow by kept drafts, pause, and end."""
    params = SamplingParams(temperature=0.0, **PENALTIES[name])
    rng = np.random.default_rng(1)
    vocab_size = 40
    shaped_logits = ShapedLogits(vocab_size)
    prompts = {i: rng.integers(0, vocab_size, 6).tolist() for i in range(4)}
    outputs: dict[int, list[int]] = {i: [] for i in range(4)}
    for step in range(200):
        present = [i for i in range(4) if rng.random() < 0.8] or [0]
        drafts = {i: tuple(rng.integers(0, vocab_size, rng.integers(0, 4)).tolist()) for i in present}
        logits = random_logits(sum(1 + len(d) for d in drafts.values()), vocab_size, seed=step)
        rows = [_sequence(i, params, prompts[i], outputs[i], drafts[i]) for i in present]
        histories = [
            (prompts[i], outputs[i] + list(drafts[i][:n])) for i in present for n in range(len(drafts[i]) + 1)
        ]
        expected = [
            _penalised(row, params, *history)
            for row, history in zip(logits.double().numpy(), histories, strict=True)
        ]
        np.testing.assert_allclose(shaped_logits(logits, rows), expected, atol=1e-4)
        for i in present:
            outputs[i] += [
                *drafts[i][: rng.integers(0, len(drafts[i]) + 1)],
                int(rng.integers(0, vocab_size)),
            ]


def test_what_is_kept_of_requests_is_bounded_by_the_step() -> None:
    sampler = Sampler(50)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    for step in range(20):
        rows = [_sequence(3 * step + i, params, [1, 2], [3]) for i in range(3)]
        sample(random_logits(3, 50), rows, sampler)
        assert sampler.num_remembered == 3
    sample(random_logits(1, 50), [scheduled_sequence(request_id=99, params=params)], sampler)
    assert sampler.num_remembered == 1


def test_a_request_that_goes_on_with_another_prompt() -> None:
    params = SamplingParams(temperature=0.0, **PENALTIES["all"])
    shaped_logits = ShapedLogits(12)
    for prompt, output in (([1], [2, 3]), ([1, 2, 3, 4], []), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [7])):
        logits = random_logits(1, 12, seed=len(prompt))
        expected = _penalised(logits[0].double().numpy(), params, prompt, output)
        found = shaped_logits(logits, [_sequence(0, params, prompt, output)])
        np.testing.assert_allclose(found[0], expected, atol=1e-5)


def test_a_penalty_touches_its_own_row_only() -> None:
    logits = torch.tensor([[2.0, 1.9], [2.0, 1.9]])
    penalised = SamplingParams(temperature=0.0, presence_penalty=2.0)
    rows = [_sequence(i, params, [], [0]) for i, params in enumerate((penalised, GREEDY))]
    assert [output.tokens[0].token_id for output in sample(logits, rows)] == [1, 0]
