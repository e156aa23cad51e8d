"""What bars tokens, and what happens where constraints contradict each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers_sampler import FakeGrammar, ShapedLogits, drawn, greedy_choice, random_logits, sample
from helpers_worker import GREEDY, scheduled_sequence
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import ThinkingBudget, TokenConstraints
from trioserve.worker.sampler import Sampler

LOGITS = [0.0, 1.0, 2.0, 3.0, 4.0]
"""Greedily 4, then 3, and so on."""


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def _bad(*words: tuple[int, ...]) -> TokenConstraints:
    return TokenConstraints(bad_words=words)


def test_logit_bias_pushes_and_bars() -> None:
    assert greedy_choice(LOGITS, params=_params(logit_bias={0: 4.5})) == [0]
    assert greedy_choice(LOGITS, params=_params(logit_bias={4: -100})) == [3]
    assert greedy_choice(LOGITS, params=_params(logit_bias={99: 100})) == [4]  # beyond the vocabulary


def test_stop_tokens_are_barred_until_min_tokens_are_there() -> None:
    params = _params(min_tokens=2, max_tokens=9, logit_bias={3: 100.0})
    for outputs, expected in (([], 2), ([0], 2), ([0, 0], 3), ([0, 0, 0], 3)):
        found = greedy_choice(
            LOGITS, params=params, stop_token_ids=frozenset({3, 4, 99}), output_token_ids=outputs
        )
        assert found == [expected]


def test_drafts_count_towards_min_tokens() -> None:
    fields = {"params": _params(min_tokens=2, max_tokens=9), "stop_token_ids": frozenset({4})}
    found = greedy_choice(LOGITS, token_ids=[0, 3, 3, 4], num_drafts=3, **fields)
    assert found == [3, 3, 4, 4]


def test_only_allowed_tokens_are_drawn() -> None:
    assert greedy_choice(LOGITS, params=_params(allowed_token_ids=(1, 2, 99))) == [2]
    rows = [
        scheduled_sequence(request_id=seed, seed=seed, params=SamplingParams(allowed_token_ids=(0, 7, 40)))
        for seed in range(200)
    ]
    outputs = sample(random_logits(1, 50, spread=0.5).expand(200, -1), rows)
    assert {drawn(output)[0] for output in outputs} == {0, 7, 40}


def test_a_single_bad_token_never_comes() -> None:
    assert greedy_choice(LOGITS, constraints=_bad((4,), (2,), (99,))) == [3]


def test_a_longer_bad_word_is_never_completed() -> None:
    constraints = _bad((1, 2, 4), (0, 4), (2, 3))
    for outputs, expected in (
        ([], 4), ([2], 4), ([1, 2], 2), ([1, 2, 0], 3), ([2, 0], 3), ([4], 4), ([1, 1, 2], 2), ([1], 4),
    ):  # fmt: skip
        assert greedy_choice(LOGITS, constraints=constraints, output_token_ids=outputs) == [expected]
    # The prompt is not output.
    assert greedy_choice(LOGITS, constraints=constraints, prompt_token_ids=[1, 2]) == [4]


def test_a_bad_word_is_not_completed_across_drafts_either() -> None:
    constraints = _bad(
        (1, 4, 4),
    )
    found = greedy_choice(
        LOGITS, constraints=constraints, output_token_ids=[1], token_ids=[1, 4, 4], num_drafts=2
    )
    assert found == [4, 3]


def test_bars_and_biases_by_their_definition() -> None:
    """Every logit of 50 rows with random constraints, against the rules written out."""
    rng = np.random.default_rng(0)
    vocab_size = 12
    logits = random_logits(50, vocab_size)
    rows, expected = [], logits.double().numpy()
    for index in range(50):
        output = rng.integers(0, vocab_size, rng.integers(0, 5)).tolist()
        words = [tuple(rng.integers(0, vocab_size, rng.integers(1, 3)).tolist()) for _ in range(3)]
        allowed = tuple(range(2, vocab_size)) if rng.random() < 0.5 else None
        bias = {int(rng.integers(0, vocab_size)): float(rng.normal())}
        params = _params(allowed_token_ids=allowed, logit_bias=bias, min_tokens=3, max_tokens=5)
        rows.append(
            scheduled_sequence(
                request_id=index,
                params=params,
                constraints=_bad(*words),
                output_token_ids=output,
                stop_token_ids=frozenset({5, 6}),
            )
        )
        for token in range(vocab_size):
            completes = any([*output, token][-len(word) :] == list(word) for word in words)
            if completes or (allowed and token not in allowed) or (len(output) < 3 and token in {5, 6}):
                expected[index, token] = -np.inf
            expected[index, token] += bias.get(token, 0)
    np.testing.assert_allclose(ShapedLogits(vocab_size)(logits, rows), expected, atol=1e-5)


def test_a_grammar_is_followed_and_told() -> None:
    grammar = FakeGrammar([{1, 2}, {0}])
    assert greedy_choice(LOGITS, grammar=grammar) == [2]
    assert grammar.taken == [2]
    assert greedy_choice(LOGITS, grammar=grammar, output_token_ids=[2]) == [0]


def test_a_grammar_in_a_large_vocabulary() -> None:
    logits = random_logits(3, 1000)
    allowed = {0, 31, 32, 63, 64, 500, 999}
    outputs = sample(
        logits, [scheduled_sequence(request_id=i, grammar=FakeGrammar([allowed])) for i in range(3)]
    )
    for row, output in zip(logits, outputs, strict=True):
        assert drawn(output) == [max(allowed, key=lambda token: float(row[token]))]


@pytest.mark.parametrize(
    ("drafts", "expected"), [((2, 0), [2, 0, 4]), ((2, 0, 4), [2, 0, 4]), ((1, 0), [2]), ((), [2])]
)
def test_a_grammar_follows_the_drafts_that_are_kept(drafts: tuple[int, ...], expected: list[int]) -> None:
    """After the third token the grammar allows nothing more: the step ends there, whoever has drafts."""
    grammar = FakeGrammar([{1, 2}, {0}, {4, 3}])
    found = greedy_choice(LOGITS, grammar=grammar, token_ids=[0, *drafts], num_drafts=len(drafts))
    assert found == grammar.taken == expected


def test_a_grammar_that_fails_ends_its_own_sequence_only() -> None:
    for grammar in (
        FakeGrammar([{1}], fails_after=0),  # by the token that is drawn
        FakeGrammar([set()]),  # which is nobody's to draw
    ):
        rows = [scheduled_sequence(request_id=0, grammar=grammar), scheduled_sequence(request_id=1)]
        failed, other = sample(torch.tensor([LOGITS, LOGITS]), rows)
        assert failed.failure
        assert not failed.tokens
        assert drawn(other) == [4]
        assert other.failure is None


def test_a_grammar_that_fails_at_a_draft() -> None:
    grammar = FakeGrammar([{2}, {1}, {0}], fails_after=1)
    row = scheduled_sequence(grammar=grammar, token_ids=[0, 2, 1], num_drafts=2)
    [output] = sample(torch.tensor([LOGITS] * 3), [row])
    assert output.failure == "too much work"
    assert not output.tokens


def test_the_grammar_is_stronger_than_everything_else() -> None:
    def choose(**fields: Any) -> list[int]:
        return greedy_choice(LOGITS, grammar=FakeGrammar([{0, 1}]), **fields)

    assert choose(params=_params(allowed_token_ids=(0, 4))) == [0]
    assert choose(params=_params(allowed_token_ids=(3, 4))) == [1]  # they have nothing in common
    assert choose(constraints=_bad((1,))) == [0]
    assert choose(constraints=_bad((0,), (1,))) == [1]
    assert choose(params=_params(min_tokens=1), stop_token_ids=frozenset({1})) == [0]
    assert choose(params=_params(min_tokens=1), stop_token_ids=frozenset({0, 1})) == [1]
    assert choose(params=_params(logit_bias={4: 100, 1: -100})) == [0]


def test_weaker_constraints_give_way_to_stronger_ones() -> None:
    stops = frozenset({2})
    assert greedy_choice(
        LOGITS, params=_params(allowed_token_ids=(1, 2)), constraints=_bad((1,), (2,))
    ) == [2]  # fmt: skip
    params = _params(allowed_token_ids=(1, 2), min_tokens=1)
    assert greedy_choice(LOGITS, params=params, constraints=_bad((1,)), stop_token_ids=stops) == [2]
    assert greedy_choice(LOGITS, params=params, constraints=_bad((2,)), stop_token_ids=stops) == [1]
    assert greedy_choice(LOGITS, constraints=_bad(*((token,) for token in range(5)))) == [4]


START, END = (1, 2), (3, 0, 3)


def _thinking(max_tokens: int) -> TokenConstraints:
    budget = ThinkingBudget(max_tokens=max_tokens, start_token_ids=START, end_token_ids=END)
    return TokenConstraints(thinking=budget)


def _think(max_tokens: int, count: int, *, prompt: list[int], output: tuple[int, ...] = ()) -> list[int]:
    """`count` tokens after `output`, by one sampler, of a model that always wants to say 4."""
    sampler = Sampler(5)
    said = list(output)
    for _ in range(count):
        row = scheduled_sequence(
            constraints=_thinking(max_tokens), prompt_token_ids=prompt, output_token_ids=said
        )
        [result] = sample(torch.tensor([LOGITS]), [row], sampler)
        said = said + drawn(result)
    return said[len(output) :]


def test_thinking_ends_when_its_budget_is_spent() -> None:
    assert _think(2, 7, prompt=[0, 1, 2]) == [4, 4, 3, 0, 3, 4, 4]
    assert _think(0, 4, prompt=[1, 2]) == [3, 0, 3, 4]
    assert _think(2, 4, prompt=[0, 1, 1]) == [4, 4, 4, 4]  # it does not think
    assert _think(2, 4, prompt=[1, 2, 4, 3, 0, 3]) == [4, 4, 4, 4]  # it has thought
    assert _think(3, 4, prompt=[1, 1, 2, 4, 4]) == [4, 3, 0, 3]  # some of it in the prompt


def test_a_section_that_begins_in_the_output() -> None:
    assert _think(2, 5, prompt=[0, 1], output=(2, 4)) == [4, 3, 0, 3, 4]
    assert _think(1, 5, prompt=[], output=(1, 2, 4, 3, 0, 3, 1, 2)) == [4, 3, 0, 3, 4]  # a new budget


def test_an_end_that_has_begun_is_completed() -> None:
    assert _think(2, 3, prompt=[1, 2], output=(4, 3)) == [0, 3, 4]
    assert _think(3, 2, prompt=[1, 2], output=(4, 3, 0)) == [3, 4]
    assert _think(3, 3, prompt=[1, 2], output=(3, 0, 0)) == [3, 0, 3]  # it had not, after all
    assert _think(4, 3, prompt=[1, 2], output=(3, 0, 0, 3)) == [0, 3, 4]


def _forced_by_definition(history: list[int], budget: ThinkingBudget) -> int | None:
    """Searches the whole history for the first start, the first end after it, and so on."""
    rest, inside = history, False
    while True:
        pattern = list(budget.end_token_ids if inside else budget.start_token_ids)
        ends = [i for i in range(len(pattern), len(rest) + 1) if rest[i - len(pattern) : i] == pattern]
        if not ends:
            break
        rest, inside = rest[ends[0] :], not inside
    if not inside or len(rest) < budget.max_tokens:
        return None
    begun = [k for k in range(len(pattern)) if rest[len(rest) - k :] == pattern[:k]]
    return pattern[max(begun)]


def test_the_budget_in_random_histories() -> None:
    """Of few different tokens, so that starts and ends overlap with what looks like them."""
    rng = np.random.default_rng(5)
    rows, expected = [], []
    for index in range(1000):
        start, end, prompt, output, drafts = (
            tuple(rng.integers(0, 2, size).tolist())
            for size in (rng.integers(1, 3), rng.integers(1, 6), rng.integers(0, 9), rng.integers(0, 9), 2)
        )
        budget = ThinkingBudget(max_tokens=3, start_token_ids=start, end_token_ids=end)
        rows.append(
            scheduled_sequence(
                request_id=index, constraints=TokenConstraints(thinking=budget), prompt_token_ids=prompt,
                output_token_ids=output, token_ids=[0, *drafts], num_drafts=2, params=GREEDY,
            )
        )  # fmt: skip
        for count in range(3):
            forced = _forced_by_definition([*prompt, *output, *drafts[:count]], budget)
            wanted = 4 if forced is None else forced
            expected.append(wanted)
            if count == 2 or wanted != drafts[count]:
                break
    found = sample(torch.tensor([LOGITS] * 3000), rows)
    assert [token for output in found for token in drawn(output)] == expected
    assert 0.1 < np.mean(np.array(expected) < 4) < 0.9


def test_the_budget_holds_across_drafts() -> None:
    found = greedy_choice(
        LOGITS, constraints=_thinking(2), prompt_token_ids=[1, 2], token_ids=[2, 4, 4, 3, 0, 3], num_drafts=5
    )
    assert found == [4, 4, 3, 0, 3, 4]
    found = greedy_choice(
        LOGITS, constraints=_thinking(2), prompt_token_ids=[1, 2], token_ids=[2, 4, 4, 4, 4], num_drafts=4
    )
    assert found == [4, 4, 3]


def test_a_grammar_that_bars_the_end_wins() -> None:
    fields = {"constraints": _thinking(0), "prompt_token_ids": [1, 2], "params": GREEDY}
    assert greedy_choice(LOGITS, grammar=FakeGrammar([{0, 2}]), **fields) == [2]
    assert greedy_choice(LOGITS, grammar=FakeGrammar([{2, 3, 4}]), **fields) == [3]
