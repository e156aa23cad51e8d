"""The routes of pooling over a real AsyncLLM, whose engine core does what the test says."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fake_engine import FakeEngine, open_fake_llm
from helpers_api import Client, Exchange
from helpers_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER, hash_of, pooling_model
from trioserve.outputs import FinishReason
from trioserve.pooling_params import PoolingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trioserve.config import Pooler

    Open = Callable[[Pooler], AbstractAsyncContextManager[FakeEngine]]


@pytest.fixture
def open_pooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    @asynccontextmanager
    async def open_it(pooler: Pooler) -> AsyncIterator[FakeEngine]:
        model = pooling_model(tmp_path, pooler)
        async with open_fake_llm(tmp_path, monkeypatch, model=model) as engine:
            yield engine

    return open_it


def expected(text: str, task: Any, pooler: Pooler, **params: Any) -> list[float]:
    values: list[float] = hash_of(
        list(text.encode()), [], PoolingParams(task=task, **params), pooler
    ).tolist()
    return values


async def test_embeddings_of_texts_and_of_tokens(open_pooling: Open) -> None:
    async with open_pooling(EMBEDDER) as engine:
        client = Client(engine.llm)  # type: ignore[arg-type]  # a real one
        texts = await client.post("/v1/embeddings", {"input": ["one", "three"], "dimensions": 4})
        tokens = await client.post("/v1/embeddings", {"input": list(b"one")})
    assert [item["embedding"] for item in texts.json["data"]] == [
        expected(text, "embed", EMBEDDER, dimensions=4) for text in ("one", "three")
    ]
    assert texts.json["usage"]["prompt_tokens"] == 8
    assert tokens.json["data"][0]["embedding"] == expected("one", "embed", EMBEDDER)


async def test_the_tokens_of_scores_are_those_that_were_computed(open_pooling: Open) -> None:
    request = {"query": "four", "documents": ["one", "three"]}
    async with open_pooling(EMBEDDER) as engine:
        once = await Client(engine.llm).post("/rerank", request)  # type: ignore[arg-type]
    async with open_pooling(CROSS_ENCODER) as engine:
        twice = await Client(engine.llm).post("/rerank", request)  # type: ignore[arg-type]
    assert once.json["usage"]["prompt_tokens"] == 4 + 3 + 5
    assert twice.json["usage"]["prompt_tokens"] == 4 + 3 + 4 + 5


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/embeddings", {"input": "a" * 65}, "input", "65 tokens"),
        ("/v1/embeddings", {"input": ["a", "b" * 65]}, "input[1]", "input[1]: This model's"),
        ("/v1/embeddings", {"input": [70000]}, "input", "70000"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions", "from 1 to 8, got 9"),
        ("/v1/embeddings", {"input": "a", "priority": 2**70}, "priority", "an integer of 64 bits"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 9}, "output_dimension", "from 1 to 8, got 9"),
        ("/v2/embed", {"texts": ["a" * 65, "b"], "truncate": "NONE"}, "texts[0]", "65 tokens"),
        ("/pooling", {"input": "a", "task": "classify"}, "task", "it supports embed, token_embed, score"),
        ("/score", {"queries": "a", "documents": "b" * 65}, "documents[0]", "65 tokens"),
        ("/score", {"text_1": "b" * 65, "text_2": "a"}, "text_1", "65 tokens"),
        ("/score", {"text_1": ["a", "b" * 65], "text_2": ["a", "b"]}, "text_1[1]", "65 tokens"),
        ("/rerank", {"query": "a", "documents": ["a", "b" * 65]}, "documents[1]", "65 tokens"),
    ],
)
async def test_what_the_model_does_not_take_is_said(
    open_pooling: Open, path: str, body: Any, param: str, words: str
) -> None:
    async with open_pooling(EMBEDDER) as engine:
        reply = await Client(engine.llm).post(path, body)  # type: ignore[arg-type]
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


async def test_what_is_too_long_is_cut_if_that_is_asked_for(open_pooling: Open) -> None:
    async with open_pooling(EMBEDDER) as engine:
        client = Client(engine.llm)  # type: ignore[arg-type]
        await client.post("/v1/embeddings", {"input": "a" * 64 + "b", "truncate_prompt_tokens": -1})
        await client.post("/v2/embed", {"texts": ["b" + "a" * 64], "truncate": "START"})
        texts = [bytes(text.prompt_token_ids[::4]) for text in engine.client.texts]
    assert texts == [b"a" * 64] * 2


async def test_classes_of_a_model(open_pooling: Open) -> None:
    async with open_pooling(CLASSIFIER) as engine:
        reply = await Client(engine.llm).post("/classify", {"input": "one"})  # type: ignore[arg-type]
    probs = expected("one", "classify", CLASSIFIER)
    (found,) = reply.json["data"]
    assert found["probs"] == probs
    assert found["label"] == CLASSIFIER.labels[probs.index(max(probs))]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v2/embed"])
async def test_a_client_that_leaves_ends_all_of_its_texts(open_pooling: Open, path: str) -> None:
    fields = {"input": ["a", "b"], "queries": "a", "documents": ["b"], "texts": ["a", "b"]}
    names = {"/v1/embeddings": ["input"], "/score": ["queries", "documents"], "/v2/embed": ["texts"]}[path]
    body = json.dumps({name: fields[name] for name in names}).encode()
    async with open_pooling(EMBEDDER) as engine:
        engine.client.pools_as = None
        app = Client(engine.llm).app  # type: ignore[arg-type]
        exchange = Exchange(app, "POST", path, body, {"content-type": "application/json"})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run)
            await wait_all_tasks_blocked()
            sent = [text.request_id for text in engine.client.texts]
            exchange.leave()
        assert len(sent) == 2
        assert sorted(engine.client.aborted) == sorted(sent)


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (FinishReason.ABORT, 503, "aborted"),
        (FinishReason.DEADLINE, 504, "deadline_exceeded"),
        (FinishReason.ERROR, 500, None),
    ],
)
async def test_why_a_text_has_no_result(
    open_pooling: Open, reason: FinishReason, status: int, code: str | None
) -> None:
    async with open_pooling(EMBEDDER) as engine, trio.open_nursery() as nursery:
        engine.client.pools_as = None
        app = Client(engine.llm).app  # type: ignore[arg-type]
        body = json.dumps({"input": ["a", "b"]}).encode()
        exchange = Exchange(app, "POST", "/v1/embeddings", body, {"content-type": "application/json"})
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        engine.client.emit_pooled(engine.client.texts[1], None, reason)
        await wait_all_tasks_blocked()
        exchange.leave()
    assert (exchange.reply.status, exchange.reply.error["code"]) == (status, code)
