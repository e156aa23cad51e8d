"""Drafts change how many tokens a step gives, and never which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers_sampler import FakeGrammar, drawn, filtered, follows, random_logits, sample
from helpers_worker import scheduled_sequence
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import ThinkingBudget, TokenConstraints
from trioserve.worker.sampler import Sampler

VOCAB_SIZE = 60


def _model(history: list[int]) -> torch.Tensor:
    """Logits that depend on the last two tokens."""
    key = hash(tuple(history[-2:])) % 2**31
    return random_logits(1, VOCAB_SIZE, spread=1.5, seed=key)[0]


def _generate(length: int, propose: Any, seed: int = 3, **fields: Any) -> tuple[list[int], list[Any], int]:
    """Tokens and their logprobs, and in how many steps. propose(output) -> drafts."""
    sampler = Sampler(VOCAB_SIZE)
    output: list[int] = []
    reported: list[Any] = []
    steps = 0
    while len(output) < length:
        drafts = propose(output)
        sequence = scheduled_sequence(
            token_ids=[0, *drafts], num_drafts=len(drafts), prompt_token_ids=[5, 6], seed=seed,
            output_token_ids=list(output), **fields,
        )  # fmt: skip
        logits = torch.stack([_model([5, 6, *output, *drafts[:n]]) for n in range(len(drafts) + 1)])
        [result] = sample(logits, [sequence], sampler)
        assert 1 <= len(result.tokens) <= len(drafts) + 1
        output += drawn(result)
        reported += [token.logprobs and list(token.logprobs.token_ids) for token in result.tokens]
        steps += 1
    return output[:length], reported[:length], steps


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"params": SamplingParams(temperature=0.0)},
    "random": {"params": SamplingParams(temperature=1.2)},
    "filtered, with logprobs": {"params": SamplingParams(temperature=0.9, top_p=0.9, top_k=30, logprobs=4)},
    "penalised": {
        "params": SamplingParams(
            temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2
        )
    },
    "constrained": {
        "params": SamplingParams(
            temperature=0.8,
            min_tokens=20,
            max_tokens=50,
            logit_bias={4: 2.0},
            allowed_token_ids=(*range(40),),
        ),
        "stop_token_ids": frozenset({4, 7}),
        "constraints": TokenConstraints(
            bad_words=((3,), (4, 5), (1, 4, 6)),
            thinking=ThinkingBudget(max_tokens=3, start_token_ids=(8,), end_token_ids=(9, 10)),
        ),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_same_with_right_wrong_and_partly_right_drafts(kind: str) -> None:
    fields = KINDS[kind]
    plain, logprobs, steps = _generate(40, lambda output: [], **fields)
    assert steps == 40
    rng = np.random.default_rng(0)

    def right(output: list[int]) -> list[int]:
        return plain[len(output) : len(output) + 4]

    def wrong(output: list[int]) -> list[int]:
        return [(token + 1) % VOCAB_SIZE for token in right(output)]

    def partly(output: list[int]) -> list[int]:
        drafts = right(output)
        return [token if rng.random() < 0.7 else int(rng.integers(0, VOCAB_SIZE)) for token in drafts]

    assert _generate(40, right, **fields) == (plain, logprobs, 8)
    assert _generate(40, wrong, **fields) == (plain, logprobs, 40)
    found, found_logprobs, steps = _generate(40, partly, **fields)
    assert (found, found_logprobs) == (plain, logprobs)
    assert 8 < steps < 40


@pytest.mark.parametrize("draft", [0, 1])
def test_the_distribution_is_that_of_drawing_without_drafts(draft: int) -> None:
    """Of the first and of the second token, over many seeds, whether the draft is likely or not."""
    params = SamplingParams(temperature=0.7, top_p=0.95)
    first = random_logits(1, 12, spread=1.0, seed=1)[0]
    seconds = random_logits(12, 12, spread=1.0, seed=2)
    proposed = int(first.argsort(descending=True)[draft * 5])
    rows = [
        scheduled_sequence(
            request_id=seed, seed=seed, params=params, token_ids=[0, proposed], num_drafts=1
        )
        for seed in range(4000)
    ]  # fmt: skip
    logits = torch.stack((first, seconds[proposed])).repeat(4000, 1)
    outputs = [drawn(output) for output in sample(logits, rows)]
    assert follows([tokens[0] for tokens in outputs], filtered(first.numpy(), params))
    accepted = [tokens[1] for tokens in outputs if len(tokens) == 2]
    assert all(tokens[0] == proposed for tokens in outputs if len(tokens) == 2)
    assert follows(accepted, filtered(seconds[proposed].numpy(), params))


def test_sequences_with_and_without_drafts_in_one_step() -> None:
    logits = random_logits(9, VOCAB_SIZE)
    best = logits.argmax(-1).tolist()
    grammar = FakeGrammar([{best[6]}, {best[7], 1}, {best[8]}])
    rows = [
        scheduled_sequence(request_id=0),
        scheduled_sequence(request_id=1, token_ids=[9, 9, 0, best[1], best[2], 59], num_drafts=3),
        scheduled_sequence(request_id=2, params=SamplingParams(temperature=0.0, logprobs=1)),
        scheduled_sequence(request_id=3, token_ids=[0, best[6], best[7]], num_drafts=2, grammar=grammar),
    ]
    found = [drawn(output) for output in sample(logits, rows)]
    assert found == [best[:1], best[1:4], best[5:6], best[6:9]]
    plain = [*rows[:2], scheduled_sequence(request_id=2)]
    assert [drawn(output) for output in sample(logits[:6], plain)] == [best[:1], best[1:4], best[5:6]]


def test_a_draft_that_completes_the_match_is_the_last_token() -> None:
    """Without drafts the request would end there, and EOS, which may follow, never be drawn."""
    logits = random_logits(4, VOCAB_SIZE)
    for drafts in ([7], [7, 8], [7, 8, 0]):
        grammar = FakeGrammar([{7}, {8}], end={0})
        sequence = scheduled_sequence(token_ids=[3, *drafts], num_drafts=len(drafts), grammar=grammar)
        (output,) = sample(logits[: 1 + len(drafts)].clone(), [sequence])
        assert drawn(output) == grammar.taken == [7, 8]
        assert grammar.is_complete
