"""POST /score and /rerank, under all their spellings."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Client, FakeLLM, Reply
from helpers_pooling_api import FakePoolingLLM
from trioserve.errors import OverloadedError
from trioserve.frontend.prompts import TextPrompt, Truncation
from trioserve.pooling_params import PoolingParams

PARTS = {"content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}


async def ask(llm: FakeLLM, path: str, **request: Any) -> Reply:
    return await Client(llm).post(path, request)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores(path: str) -> None:
    llm = FakePoolingLLM()
    reply = (await ask(llm, path, queries="abc", documents=["ab", "a b"])).json
    assert reply["data"] == [
        {"index": 0, "object": "score", "score": 0.5},
        {"index": 1, "object": "score", "score": 1.0},
    ]
    assert reply["id"].startswith("score-")
    assert reply["usage"] == {"prompt_tokens": 1 + 1 + 2, "total_tokens": 4}, "the query is computed once"
    ((queries, documents),) = llm.scored
    assert (queries.prompts, documents.prompts) == (
        [TextPrompt("abc")],
        [TextPrompt("ab"), TextPrompt("a b")],
    )
    assert queries.params == PoolingParams()
    assert queries.request_id == reply["id"]


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
)
@pytest.mark.parametrize(
    ("first", "second", "count"), [("a", "b", 1), ("a", ["b", "c"], 2), (["a", "b"], ["c", "d"], 2)]
)
async def test_the_pairs_of_names(names: tuple[str, str], first: Any, second: Any, count: int) -> None:
    reply = await ask(FakePoolingLLM(), "/score", **dict(zip(names, (first, second), strict=True)))
    assert len(reply.json["data"]) == count


async def test_fields_of_scores_reach_the_engine() -> None:
    llm = FakePoolingLLM()
    await ask(
        llm, "/score", queries=[PARTS, {"text": "d e f"}], documents=["one two three", "x"], priority=1,
        request_id="mine", use_activation=False, truncate_prompt_tokens=7, max_tokens_per_query=2,
        max_tokens_per_doc=1,
    )  # fmt: skip
    ((queries, documents),) = llm.scored
    cut = Truncation(7, keeps_end=False)
    assert queries.prompts == [TextPrompt("ab c", truncation=cut), TextPrompt("d e", truncation=cut)]
    assert [prompt.text for prompt in documents.prompts] == ["one", "x"]
    assert (queries.request_id, queries.priority) == ("score-mine", 1)
    assert queries.params == PoolingParams(use_activation=False)


async def test_parts_are_joined_by_line_breaks() -> None:
    llm = FakePoolingLLM()
    await ask(llm, "/score", queries=PARTS, documents=[PARTS])
    assert llm.scored[0][0].prompts == [TextPrompt("ab\nc")]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "queries", "Exactly one of these pairs must be given: queries and documents"),
        ({"queries": "a"}, "queries", "Exactly one of these pairs"),
        ({"queries": "a", "text_2": "b"}, "queries", "Exactly one of these pairs"),
        ({"text_1": [], "text_2": "b"}, "text_1", "text_1 must hold at least one text"),
        ({"text_1": "a", "text_2": []}, "text_2", "text_2 must hold at least one text"),
        ({"data_1": ["a", "b"], "data_2": ["c"]}, "data_1", "or as many as data_2 (1), got 2"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "at most 2048 texts, got 2049"),
        ({"queries": 7, "documents": "a"}, "queries", "queries must be"),
        ({"queries": {}, "documents": "a"}, "queries.text", "one of text and content"),
        ({"queries": "a", "documents": "b", "instruction": "x"}, "instruction", "must be null"),
        ({"queries": "a", "documents": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc", ">= 1, or 0"),
    ],
)
async def test_what_is_wrong_with_scores_is_said(fields: dict[str, Any], param: str, words: str) -> None:
    llm = FakePoolingLLM()
    reply = await ask(llm, "/score", **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]
    assert not llm.scored


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_best_document_comes_first(path: str) -> None:
    documents = ["abcdef", "ab", {"text": "abc"}, PARTS]
    reply = (await ask(FakePoolingLLM(), path, query="abc", documents=documents)).json
    assert [(found["index"], found["relevance_score"]) for found in reply["results"]] == [
        (2, 1.0), (1, 0.5), (3, 0.5), (0, 0.25)
    ]  # fmt: skip
    assert [found["document"]["text"] for found in reply["results"]] == ["abc", "ab", "ab\nc", "abcdef"]
    assert reply["id"].startswith("rerank-")
    assert reply["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize(("top_n", "count"), [(None, 3), (0, 3), (2, 2), (9, 3)])
async def test_top_n(top_n: int | None, count: int) -> None:
    reply = await ask(FakePoolingLLM(), "/rerank", query="a", documents=["b", "cd", "efg"], top_n=top_n)
    assert len(reply.json["results"]) == count


async def test_documents_are_left_out_if_that_is_asked_for() -> None:
    reply = await ask(FakePoolingLLM(), "/rerank", query="a", documents=["b"], return_documents=False)
    assert reply.json["results"] == [{"index": 0, "document": None, "relevance_score": 1.0}]


async def test_an_empty_document_is_one() -> None:
    """Search engines have them, and the others are to be ranked all the same."""
    reply = await ask(FakePoolingLLM(), "/rerank", query="a", documents=["", "b"])
    assert [found["index"] for found in reply.json["results"]] == [1, 0]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"query": None}, "query", "query must be"),
        ({"documents": []}, "documents", "at least one document"),
        ({"documents": "a"}, "documents", "documents must be a list"),
        ({"documents": ["a"] * 2049}, "documents", "at most 2048 documents, got 2049"),
        (
            {"documents": [{"content": [{"type": "image_url"}]}]},
            "documents[0].content[0].type",
            "one of 'text'",
        ),
        ({"top_n": -1}, "top_n", "top_n must be an integer >= 0, got -1"),
    ],
)
async def test_what_is_wrong_with_a_ranking_is_said(fields: dict[str, Any], param: str, words: str) -> None:
    reply = await ask(FakePoolingLLM(), "/rerank", **{"query": "a", "documents": ["b"], **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


async def test_a_model_that_gives_no_scores_says_so() -> None:
    reply = await ask(FakePoolingLLM("classify"), "/rerank", query="a", documents=["b"])
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "The tasks are of 'small' classify" in reply.error["message"]


async def test_too_many_documents_for_the_queue() -> None:
    llm = FakePoolingLLM()
    llm.room = 1
    reply = await ask(llm, "/rerank", query="a", documents=["b", "c"])
    assert reply.status == 503
    llm.no_room = OverloadedError("Too many wait.")
    assert (await ask(llm, "/score", queries="a", documents="b")).status == 503
