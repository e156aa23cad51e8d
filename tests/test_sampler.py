"""The sampler against distributions and formulas written out in float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers_worker import GREEDY, scheduled_sequence
from trioserve.sampling_params import SamplingParams
from trioserve.worker.sampler import sample, uniform

Array = np.ndarray


def _logits(rows: int, vocab_size: int, *, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _expected(logits: Array, params: SamplingParams) -> Array:
    """Every filter by its definition, over the whole vocabulary."""
    p = _softmax(logits.astype(np.float64) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    mass_before = np.concatenate(([0], p[order].cumsum()[:-1]))
    p[order[mass_before >= params.top_p]] = 0
    return p / p.sum()


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
    "nearly nothing": {"top_p": 1e-6},
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_filtered_distribution(name: str) -> None:
    params = SamplingParams(**{"temperature": 1.0} | DISTRIBUTIONS[name])
    logits = _logits(1, 3000, spread=1.5)
    num_draws = 2000
    rows = [
        scheduled_sequence(params=params, seed=draw // 500, output_token_ids=[0] * (draw % 500))
        for draw in range(num_draws)
    ]
    drawn = np.array([token.token_id for token in sample(logits.repeat(num_draws, 1), rows)])
    expected = _expected(logits[0].numpy(), params)
    assert (expected[drawn] > 0).all()
    assert _chi_square_excess(drawn, expected) < 4


def _chi_square_excess(drawn: Array, expected: Array, num_groups: int = 16) -> float:
    """Standard deviations by which Pearson's statistic exceeds its mean; tokens are grouped by id."""
    group_of = np.arange(len(expected)) % num_groups
    masses = np.bincount(group_of, expected, num_groups) * len(drawn)
    counts = np.bincount(drawn % num_groups, minlength=num_groups)
    likely = masses > 0
    freedom = max(1, likely.sum() - 1)
    statistic = ((counts - masses)[likely] ** 2 / masses[likely]).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def test_the_chi_square_test_can_fail() -> None:
    expected = np.full(64, 1 / 64)
    drawn = np.random.default_rng(0).integers(0, 64, 2000)
    assert _chi_square_excess(drawn, expected) < 4
    assert _chi_square_excess(drawn, np.where(np.arange(64) % 16 == 0, 1.5, 29 / 30) / 64) > 4


def test_uniform_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(5, i) for i in range(4000)], [uniform(i - 2000, 3) for i in range(4000)]):
        values = np.array(numbers)
        assert ((values >= 0) & (values < 1)).all()
        assert _chi_square_excess((values * 64).astype(np.int64), np.full(64, 1 / 64)) < 4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06


def test_a_row_is_the_same_alone_and_among_31_others() -> None:
    vocab_size = 2000
    logits = _logits(32, vocab_size)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95, "logprobs": 3},
        {"temperature": 2.0, "top_p": 0.99},
        {"top_k": 50, "repetition_penalty": 1.3, "logprobs": 0},
        {"min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.0, "logit_bias": {7: 3.0}, "logprobs": 20},
        {"min_tokens": 9, "top_k": 3},
    ]
    rows = [
        scheduled_sequence(
            params=SamplingParams(**kinds[row % 8]),
            seed=row * 7 - 100,
            prompt_token_ids=[row, row + 1],
            output_token_ids=list(range(row % 11)),
        )
        for row in range(32)
    ]
    together = sample(logits.clone(), rows)
    for row, token in enumerate(together):
        [alone] = sample(logits[row : row + 1].clone(), [rows[row]])
        assert _as_tuple(alone) == _as_tuple(token)
    reversed_rows = sample(logits.flip(0), rows[::-1])
    assert [t.token_id for t in reversed_rows[::-1]] == [t.token_id for t in together]


def _as_tuple(token: Any) -> tuple[object, ...]:
    return token.token_id, tuple(token.logprob_token_ids), tuple(token.logprobs), tuple(token.ranks)


def test_ties_are_broken_alike_in_any_company() -> None:
    """bf16 logits tie often; which of the tied tokens is drawn may not depend on the other rows."""
    logits = _logits(16, 2000, spread=0.5).bfloat16()
    params = [SamplingParams(top_p=0.02 + 0.06 * row, logprobs=row) for row in range(16)]
    rows = [scheduled_sequence(params=p, seed=row) for row, p in enumerate(params)]
    together = sample(logits, rows)
    for row, token in enumerate(together):
        assert _as_tuple(sample(logits[row : row + 1], [rows[row]])[0]) == _as_tuple(token)


def test_greedy_and_random_rows_side_by_side() -> None:
    logits = _logits(4, 100)
    params = [GREEDY, SamplingParams(), SamplingParams(temperature=1e-6), SamplingParams(top_k=1)]
    tokens = sample(logits.clone(), [scheduled_sequence(params=p) for p in params])
    best = logits.argmax(-1).tolist()
    assert [tokens[i].token_id for i in (0, 2, 3)] == [best[i] for i in (0, 2, 3)]
    assert all(not token.logprobs for token in tokens)


def test_logprobs_are_the_raw_ones_and_ranks_count_what_is_likelier() -> None:
    logits = _logits(1, 200)
    params = SamplingParams(temperature=2.0, logprobs=5, logit_bias={3: 100.0}, repetition_penalty=3.0)
    [token] = sample(logits.clone(), [scheduled_sequence(params=params)])
    expected = np.log(_softmax(logits[0].double().numpy()))
    order = np.argsort(-expected)
    assert token.token_id == 3
    assert list(token.logprob_token_ids) == [3, *order[:5]]
    np.testing.assert_allclose(token.logprobs, expected[list(token.logprob_token_ids)], atol=1e-5)
    assert list(token.ranks) == [1 + int(np.flatnonzero(order == 3)[0]), 1, 2, 3, 4, 5]


def test_equally_likely_tokens_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 0.0]])
    params = SamplingParams(temperature=0.0, logprobs=4)
    [token] = sample(logits, [scheduled_sequence(params=params)])
    assert list(token.ranks) == [1, 1, 1, 3, 4]
    assert set(token.logprob_token_ids[1:3]) == {1, 2}


def test_more_logprobs_than_tokens() -> None:
    params = SamplingParams(logprobs=20)
    [token] = sample(_logits(1, 6), [scheduled_sequence(params=params)])
    assert len(token.logprobs) == 1 + 6


def _greedy_over(logits: list[float], **fields: Any) -> int:
    """The token that wins after everything but the draw."""
    params = SamplingParams(temperature=0.0, **fields.pop("params"))
    return sample(torch.tensor([logits]), [scheduled_sequence(params=params, **fields)])[0].token_id


def test_logit_bias_pushes_and_bars() -> None:
    assert _greedy_over([1.0, 2.0, 3.0], params={"logit_bias": {0: 2.5}}) == 0
    assert _greedy_over([1.0, 2.0, 3.0], params={"logit_bias": {2: -100}}) == 1
    assert _greedy_over([1.0, 2.0, 3.0], params={"logit_bias": {99: 100}}) == 2  # beyond the vocabulary


def test_stop_tokens_are_barred_until_min_tokens_are_there() -> None:
    logits, stops = [0.0, 1.0, 5.0, 4.0], frozenset({2, 3, 99})
    params = {"min_tokens": 2, "max_tokens": 9, "logit_bias": {3: 100.0}}
    for outputs, expected in (([], 1), ([0], 1), ([0, 0], 3), ([0, 0, 0], 3)):
        found = _greedy_over(logits, params=params, stop_token_ids=stops, output_token_ids=outputs)
        assert found == expected


PENALTIES: dict[str, dict[str, float]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition that encourages": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.1},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_follow_their_formulas(name: str) -> None:
    """Seen through the draw: top_k=1 after the penalties is the arg max of the formula, token by token."""
    params = SamplingParams(top_k=1, **PENALTIES[name])
    rng = np.random.default_rng(3)
    logits = _logits(300, 12, spread=1.0)
    prompts, outputs = ([list(rng.integers(0, 12, rng.integers(0, 7))) for _ in range(300)] for _ in range(2))
    rows = [
        scheduled_sequence(params=params, prompt_token_ids=p, output_token_ids=o)
        for p, o in zip(prompts, outputs, strict=True)
    ]
    found = [token.token_id for token in sample(logits.clone(), rows)]
    expected = [
        int(_penalised(row, params, p, o).argmax())
        for row, p, o in zip(logits.double().numpy(), prompts, outputs, strict=True)
    ]
    assert found == expected
    assert found != logits.argmax(-1).tolist()


def _penalised(logits: Array, params: SamplingParams, prompt: list[int], output: list[int]) -> Array:
    changed = logits.copy()
    for token in set(prompt + output):
        x = changed[token]
        changed[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token in set(output):
        changed[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return changed


def test_a_penalty_touches_its_own_row_only() -> None:
    logits = torch.tensor([[2.0, 1.9], [2.0, 1.9]])
    penalised = SamplingParams(temperature=0.0, presence_penalty=2.0)
    rows = [scheduled_sequence(params=p, output_token_ids=[0]) for p in (penalised, GREEDY)]
    assert [token.token_id for token in sample(logits, rows)] == [1, 0]
