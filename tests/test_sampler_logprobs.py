"""Logprobs of drawn tokens against a log softmax in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from helpers_sampler import random_logits, sample, softmax
from helpers_worker import scheduled_sequence
from trioserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioserve.worker.batch import LogprobRow


def _report(logits: torch.Tensor, params: SamplingParams) -> LogprobRow:
    [output] = sample(logits, [scheduled_sequence(params=params)])
    [token] = output.tokens
    assert token.logprobs is not None
    assert token.token_id == token.logprobs.token_ids[0]
    return token.logprobs


def _check(row: LogprobRow, logits: torch.Tensor, others: list[int]) -> None:
    expected = np.log(softmax(logits[0].double().numpy()))
    assert list(row.token_ids[1:]) == others
    np.testing.assert_allclose(row.logprobs, expected[list(row.token_ids)], atol=1e-5)
    assert list(row.ranks) == [1 + (expected > expected[token]).sum() for token in row.token_ids]


@pytest.mark.parametrize("num_top", [0, 5, 20, 21, 300, 600, -1])
def test_they_are_the_raw_ones_and_ranks_count_what_is_likelier(num_top: int) -> None:
    logits = random_logits(1, 600)
    bias = {3: 100.0}  # a token that the model finds unlikely is drawn
    row = _report(
        logits, SamplingParams(temperature=2.0, logprobs=num_top, logit_bias=bias, repetition_penalty=3.0)
    )
    assert row.token_ids[0] == 3
    order = logits[0].argsort(descending=True).tolist()
    _check(row, logits, order if num_top == -1 else order[:num_top])


def test_tokens_asked_for_by_id_come_last() -> None:
    logits = random_logits(1, 200)
    best = int(logits.argmax())
    row = _report(logits, SamplingParams(temperature=0.0, logprobs=1, logprob_token_ids=(7, 150, best)))
    _check(row, logits, [best, 7, 150, best])
    _check(_report(logits, SamplingParams(logprob_token_ids=(7, 999, 8))), logits, [7, 8])


def test_equally_likely_tokens_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 0.0]])
    row = _report(logits, SamplingParams(temperature=0.0, logprobs=4, logprob_token_ids=(2,)))
    assert list(row.ranks) == [1, 1, 1, 3, 4, 1]
    assert set(row.token_ids[1:3]) == {1, 2}


def test_more_logprobs_than_tokens() -> None:
    row = _report(random_logits(1, 6), SamplingParams(logprobs=20))
    assert sorted(row.token_ids[1:]) == list(range(6))


def test_rows_that_ask_for_different_things() -> None:
    logits = random_logits(6, 400)
    params = [SamplingParams(temperature=0.0, logprobs=k) for k in (2, None, 0, -1, 30, 2)]
    outputs = sample(logits, [scheduled_sequence(params=p) for p in params])
    found = [output.tokens[0].logprobs for output in outputs]
    assert [len(row.token_ids) if row else None for row in found] == [3, None, 1, 401, 31, 3]
    for index, row in enumerate(found):
        if row is not None:
            order = logits[index].argsort(descending=True).tolist()
            _check(row, logits[index : index + 1], order[: len(row.token_ids) - 1])
