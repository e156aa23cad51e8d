"""The log-likelihoods that lm-evaluation-harness computes from `/v1/completions` are those of transformers.

Its `local-completions` sends lists of prompts as token ids, with echo, logprobs 1 and max_tokens 1, adds up
`token_logprobs` from the continuation on, without the one token that was generated, and calls a continuation
greedy if each of its tokens is the likeliest of `top_logprobs`. With max_tokens 0, none was generated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

from helpers_model_sources import TransformersReference, packaged_model
from served import MODEL, served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from served import ServedModel

TOLERANCE = 1e-3
"""Of the logprob of one token."""

_LONG = " ".join(f"In the year {year} the river rose by {year % 17} feet." for year in range(1900, 1907))
_QUESTIONS: list[tuple[str, list[str]]] = [
    ("The capital of France is", [" Paris", " Rome", " the city of Berlin", " 🙂"]),
    ("Question: What do bees make?\nAnswer:", [" honey", " milk", " the sun\n", " Honig, auf Deutsch"]),
    ("Das Café an der Ecke ist", [" geschlossen.", " geöffnet (täglich)!", " 漢字", " a"]),
    (_LONG, [" In the year 1907 the river rose by", " The end."]),
]


@attrs.frozen
class Pair:
    """A context and a continuation, as lm-eval pairs them; the contexts are shared, as in multiple choice."""

    context: list[int]
    continuation: list[int]

    @property
    def prompt(self) -> list[int]:
        return self.context + self.continuation


@attrs.frozen
class Judgement:
    logprobs: list[float]
    """Of the continuation's tokens."""
    is_greedy: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """In float32, as the reference is."""
    with served(tmp_path_factory.mktemp("server"), ["--dtype", "float32"]) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> TransformersReference:
    return TransformersReference(packaged_model(MODEL))


@pytest.fixture(scope="module")
def pairs(reference: TransformersReference) -> list[Pair]:
    return [
        Pair(reference.encode(context), reference.encode(continuation))
        for context, continuations in _QUESTIONS
        for continuation in continuations
    ]


@pytest.fixture(scope="module")
def expected(reference: TransformersReference, pairs: list[Pair]) -> list[Judgement]:
    return [_judge_by_reference(reference, pair) for pair in pairs]


def _judge_by_reference(reference: TransformersReference, pair: Pair) -> Judgement:
    rows = reference.logprobs(pair.prompt)[-len(pair.continuation) :]
    return Judgement(
        [float(row[token_id]) for row, token_id in zip(rows, pair.continuation, strict=True)],
        bool((np.argmax(rows, axis=-1) == pair.continuation).all()),
    )


def _judge_as_lm_eval_does(choice: Any, pair: Pair, max_tokens: int) -> Judgement:
    found = choice["logprobs"]
    end = len(found["token_logprobs"]) - max_tokens
    assert end == len(pair.prompt)
    logprobs = found["token_logprobs"][len(pair.context) : end]
    tops = found["top_logprobs"][len(pair.context) : end]
    return Judgement(
        logprobs,
        all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True)),
    )


def _ask(server: ServedModel, prompts: Sequence[Any], max_tokens: int) -> list[Any]:
    body = {
        "model": MODEL, "prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1,
        "echo": True, "seed": 1234,
    }  # fmt: skip
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    return answer["choices"]


def _check(found: list[Judgement], expected: list[Judgement]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
        assert ours.is_greedy == theirs.is_greedy


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_batch_of_token_ids(
    server: ServedModel, pairs: list[Pair], expected: list[Judgement], max_tokens: int
) -> None:
    """The second time, the prefix cache has all of them."""
    choices = _ask(server, [pair.prompt for pair in pairs], max_tokens)
    found = [
        _judge_as_lm_eval_does(choice, pair, max_tokens) for choice, pair in zip(choices, pairs, strict=True)
    ]
    _check(found, expected)
    assert {judgement.is_greedy for judgement in expected} == {False, True}


def test_one_prompt_at_a_time(server: ServedModel, pairs: list[Pair], expected: list[Judgement]) -> None:
    """As with batch_size 1, which sends a list of one all the same; and a bare list of ids."""
    for pair, judgement in list(zip(pairs, expected, strict=True))[::3]:
        (as_list,) = _ask(server, [pair.prompt], 1)
        _check([_judge_as_lm_eval_does(as_list, pair, 1)], [judgement])
    body = {"model": MODEL, "prompt": pairs[0].prompt, "max_tokens": 1, "logprobs": 1, "echo": True}
    _, answer = server.request("POST", "/v1/completions", body)
    _check([_judge_as_lm_eval_does(answer["choices"][0], pairs[0], 1)], [expected[0]])


def test_texts_instead_of_token_ids(server: ServedModel, reference: TransformersReference) -> None:
    """With `tokenized_requests=False`; the tokens of the whole text are those that count."""
    texts = [context + continuations[0] for context, continuations in _QUESTIONS]
    for text, choice in zip(texts, _ask(server, texts, 0), strict=True):
        token_ids = reference.encode(text)
        rows = reference.logprobs(token_ids)
        assert choice["text"] == text
        first, *rest = choice["logprobs"]["token_logprobs"]
        assert first is None
        wanted = [float(row[token_id]) for row, token_id in zip(rows, token_ids[1:], strict=True)]
        assert rest == pytest.approx(wanted, abs=TOLERANCE)
