"""Embeddings."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

import openai
import pytest

if TYPE_CHECKING:
    from endpoint import Endpoint

TEXTS = ["A cat sat on the mat.", "A kitten was sitting on a rug.", "Interest rates rose in May."]


@pytest.fixture
def client(embeddings: Endpoint) -> openai.OpenAI:
    """Not strict: it would want a list of numbers before it has made one of the base64."""
    return openai.OpenAI(base_url=embeddings.api, api_key=embeddings.key, max_retries=0)


def test_texts(client: openai.OpenAI, embeddings: Endpoint) -> None:
    """The client asks for base64 by itself, and makes numbers of it."""
    packed = client.embeddings.create(model=embeddings.model, input=TEXTS).data
    floats = client.embeddings.create(model=embeddings.model, input=TEXTS, encoding_format="float").data
    assert [item.embedding for item in packed] == [item.embedding for item in floats]
    first, second, third = (item.embedding for item in floats)
    assert math.hypot(*first) == pytest.approx(1, abs=1e-5)
    assert product(first, second) > 0.4 > product(first, third)


def product(first: list[float], second: list[float]) -> float:
    return sum(map(operator.mul, first, second))


def test_usage_and_token_ids(client: openai.OpenAI, embeddings: Endpoint) -> None:
    answer = client.embeddings.create(model=embeddings.model, input=[[101, 102], [101, 2000, 102]])
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)
    assert [item.index for item in answer.data] == [0, 1]


def test_raw(client: openai.OpenAI, embeddings: Endpoint) -> None:
    raw = client.embeddings.with_raw_response.create(model=embeddings.model, input="one")
    assert raw.headers["x-request-id"]
    assert len(raw.parse().data) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [("", "input must not be an empty string"), ([], "at least one text"), (["a"] * 2049, "at most 2048")],
)
def test_errors(client: openai.OpenAI, embeddings: Endpoint, given: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.embeddings.create(model=embeddings.model, input=given)
    assert caught.value.param == "input"
