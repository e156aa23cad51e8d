"""Cohere's SDK, by its second API."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import cohere
import pytest

if TYPE_CHECKING:
    from endpoint import Endpoint

TEXTS = ["A kitten was sitting on a rug.", "Interest rates rose in May."]
QUERY = "A cat sat on the mat."


@pytest.fixture
def client(embeddings: Endpoint) -> cohere.ClientV2:
    return cohere.ClientV2(api_key=embeddings.key, base_url=embeddings.url)


def test_embeddings_of_all_types(client: cohere.ClientV2, embeddings: Endpoint) -> None:
    answer = client.embed(
        model=embeddings.model, texts=TEXTS, input_type="search_document",
        embedding_types=["float", "binary", "ubinary", "base64"],
    )  # fmt: skip
    assert answer.texts == TEXTS
    found = answer.embeddings
    assert [math.hypot(*vector) for vector in found.float_] == pytest.approx([1, 1], abs=1e-5)
    assert [len(vector) for vector in found.ubinary] == [len(found.float_[0]) // 8] * 2
    assert [[byte + 128 for byte in vector] for vector in found.binary] == found.ubinary
    assert len(found.base64) == 2
    assert answer.meta.billed_units.input_tokens > 0


def test_rerank(client: cohere.ClientV2, embeddings: Endpoint) -> None:
    answer = client.rerank(model=embeddings.model, query=QUERY, documents=TEXTS, top_n=1)
    assert [result.index for result in answer.results] == [0]
    assert 0 < answer.results[0].relevance_score <= 1


def test_errors(client: cohere.ClientV2, embeddings: Endpoint) -> None:
    with pytest.raises(cohere.errors.BadRequestError, match="input_type"):
        client.embed(model=embeddings.model, texts=TEXTS, input_type="poem", embedding_types=["float"])
