"""Logits that nothing can be drawn from: an error of the sequence whose they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from helpers_sampler import drawn, random_logits
from helpers_worker import scheduled_sequence
from trioserve.sampling_params import SamplingParams
from trioserve.worker.sampler import Sampler

VOCAB_SIZE = 100
NOT_FINITE = "The model's logits are no finite numbers."
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, with logprobs": SamplingParams(temperature=0, logprobs=2),
    "random": SamplingParams(temperature=1),
    "filtered": SamplingParams(temperature=1, top_k=3, min_p=0.01, top_p=0.9),
    "penalised": SamplingParams(temperature=1, repetition_penalty=1.2),
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_whole_row", [True, False])
def test_only_their_sequence_fails(params: SamplingParams, value: float, is_whole_row: bool) -> None:
    sequences = [scheduled_sequence(params=params, seed=seed) for seed in range(3)]
    logits = random_logits(3, VOCAB_SIZE)
    expected = [drawn(output) for output in Sampler(VOCAB_SIZE).sample(logits.clone().numpy(), sequences)]
    logits[1, slice(None) if is_whole_row else 7] = value
    outputs = Sampler(VOCAB_SIZE).sample(logits.numpy(), sequences)
    assert [drawn(outputs[0]), drawn(outputs[2])] == [expected[0], expected[2]]
    if value == -math.inf and not is_whole_row:  # a token that cannot come
        assert outputs[1].failure is None
    else:
        assert (outputs[1].failure, drawn(outputs[1])) == (NOT_FINITE, [])


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_rows_after_a_wrong_draft_do_not_matter(params: SamplingParams) -> None:
    def outputs_of(draft: int) -> Any:
        sequence = scheduled_sequence(token_ids=[0, draft], num_drafts=1, params=params)
        logits = torch.zeros(2, VOCAB_SIZE)
        logits[0, 5] = 100.0
        logits[1] = math.nan
        (output,) = Sampler(VOCAB_SIZE).sample(logits.numpy(), [sequence])
        return output

    assert drawn(outputs_of(draft=6)) == [5]
    assert outputs_of(draft=5).failure == NOT_FINITE
