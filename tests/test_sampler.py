"""Draws against distributions written out in float64 numpy; and that no row depends on the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers_sampler import Array, drawn, filtered, follows, random_logits, sample
from helpers_worker import GREEDY, scheduled_sequence
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import TokenConstraints
from trioserve.worker.sampler import uniform

if TYPE_CHECKING:
    import torch

    from trioserve.worker.batch import SequenceOutput

DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 7},
    "top_k of the second size": {"top_k": 300, "temperature": 2.0},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "top_p of the second size": {"top_p": 0.6},
    "top_p over most of the vocabulary": {"top_p": 0.97, "temperature": 2.0},
    "min_p": {"min_p": 0.05},
    "min_p that keeps most": {"min_p": 1e-4},
    "all": {"min_p": 0.01, "top_k": 40, "top_p": 0.7, "temperature": 1.3},
    "top_p of what min_p leaves": {"min_p": 0.002, "top_p": 0.5, "temperature": 1.5},
    "top_p of what top_k leaves": {"top_k": 12, "top_p": 0.9, "temperature": 2.0},
    "nearly nothing": {"top_p": 1e-6},
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_filtered_distribution(name: str) -> None:
    params = SamplingParams(**{"temperature": 1.0} | DISTRIBUTIONS[name])
    logits = random_logits(1, 3000, spread=1.5)
    tokens = _draws(logits, 2000, params=params)
    assert follows(tokens, filtered(logits[0].numpy(), params))


def _draws(logits: torch.Tensor, count: int, **fields: Any) -> Array:
    """From one distribution, with a seed each."""
    rows = [scheduled_sequence(request_id=seed, seed=seed, **fields) for seed in range(count)]
    return np.array([drawn(output)[0] for output in sample(logits.expand(count, -1), rows)])


def test_draws_follow_the_distribution_of_everything_together() -> None:
    """Allowed ids, a bias, a bad word, min_tokens, all penalties and all filters, in their order."""
    vocab_size = 400
    logits = random_logits(1, vocab_size, spread=1.0)
    params = SamplingParams(
        temperature=1.2, min_p=0.02, top_k=60, top_p=0.9, min_tokens=9,
        allowed_token_ids=tuple(range(0, vocab_size, 2)), logit_bias={10: 3.0, 12: -2.0},
        repetition_penalty=1.4, frequency_penalty=0.4, presence_penalty=0.3,
    )  # fmt: skip
    prompt, output = [0, 10, 20, 30], [40, 50, 40, 60, 10]
    best = int(logits[0, ::2].argmax()) * 2
    constraints = TokenConstraints(bad_words=((best,), (60, 10, 100), (61, 10, 102)))
    tokens = _draws(
        logits, 4000, params=params, constraints=constraints, prompt_token_ids=prompt,
        output_token_ids=output, stop_token_ids=frozenset({4, 6}),
    )  # fmt: skip

    x = logits[0].double().numpy()
    x[1::2] = -np.inf
    x[[best, 100, 4, 6]] = -np.inf
    x[10] += 3.0
    x[12] -= 2.0
    for token in set(prompt + output):
        x[token] = x[token] / 1.4 if x[token] > 0 else x[token] * 1.4
    for token in set(output):
        x[token] -= 0.4 * output.count(token) + 0.3
    assert follows(tokens, filtered(x, params))


def test_the_chi_square_test_can_fail() -> None:
    expected = np.full(64, 1 / 64)
    tokens = np.random.default_rng(0).integers(0, 64, 2000)
    assert follows(tokens, expected)
    assert not follows(tokens, np.where(np.arange(64) % 16 == 0, 2, 14 / 15) / 64)
    assert not follows(tokens, np.where(np.arange(64) == 5, 0, 1 / 63))


def test_uniform_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(5, i) for i in range(4000)], [uniform(i - 2000, 3) for i in range(4000)]):
        values = np.array(numbers)
        assert ((values >= 0) & (values < 1)).all()
        assert follows((values * 64).astype(np.int64), np.full(64, 1 / 64))
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.08


KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "logprobs": 3},
    {"temperature": 2.0, "top_p": 0.99},
    {"top_k": 50, "repetition_penalty": 1.3, "logprobs": 0},
    {"min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {7: 3.0}, "logprobs": -1},
    {"min_tokens": 9, "top_k": 3, "logprob_token_ids": (5, 6), "allowed_token_ids": tuple(range(900))},
]


def test_a_row_is_the_same_alone_and_among_31_others() -> None:
    logits = random_logits(32, 2000)
    rows = [
        scheduled_sequence(
            request_id=row,
            params=SamplingParams(**KINDS[row % 8]),
            seed=row * 7 - 100,
            prompt_token_ids=[row, row + 1],
            output_token_ids=list(range(row % 11)),
        )
        for row in range(32)
    ]
    together = sample(logits, rows)
    for row, output in enumerate(together):
        [alone] = sample(logits[row : row + 1], [rows[row]])
        assert _everything(alone) == _everything(output)
    reversed_rows = sample(logits.flip(0), rows[::-1])
    assert [_everything(output) for output in reversed_rows[::-1]] == [_everything(o) for o in together]


def _everything(output: SequenceOutput) -> list[object]:
    return [
        (token.token_id, token.logprobs and [list(part) for part in _parts(token.logprobs)])
        for token in output.tokens
    ]


def _parts(row: Any) -> tuple[Any, ...]:
    return row.token_ids, row.logprobs, row.ranks


def test_ties_are_broken_alike_in_any_company() -> None:
    """bf16 logits tie often; which of the tied tokens is drawn may not depend on the other rows."""
    logits = random_logits(16, 2000, spread=0.5).bfloat16()
    params = [SamplingParams(top_p=0.02 + 0.06 * row, logprobs=row * 5) for row in range(16)]
    rows = [scheduled_sequence(params=p, seed=row) for row, p in enumerate(params)]
    for row, output in enumerate(sample(logits, rows)):
        assert _everything(sample(logits[row : row + 1], [rows[row]])[0]) == _everything(output)


def test_greedy_and_random_rows_side_by_side() -> None:
    logits = random_logits(4, 100)
    params = [GREEDY, SamplingParams(), SamplingParams(temperature=1e-6), SamplingParams(top_k=1)]
    outputs = sample(logits, [scheduled_sequence(params=p) for p in params])
    best = logits.argmax(-1).tolist()
    assert [drawn(outputs[i]) for i in (0, 2, 3)] == [[best[i]] for i in (0, 2, 3)]
    assert all(token.logprobs is None for output in outputs for token in output.tokens)


@pytest.mark.parametrize("others", [{}, {"min_p": 1.0}, {"top_k": 5}])
def test_the_smallest_top_p_leaves_the_most_likely_token(others: dict[str, Any]) -> None:
    logits = random_logits(3, 100)
    params = SamplingParams(top_p=5e-324, temperature=2.0, **others)
    outputs = sample(logits, [scheduled_sequence(params=params, seed=row) for row in range(3)])
    assert [drawn(output) for output in outputs] == [[token] for token in logits.argmax(-1).tolist()]
