"""`AsyncLLM.encode`, `encode_many` and `score` over an engine that does what the test says."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fake_engine import FakeEngine, open_fake_llm
from helpers_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER, hash_of, pooling_model
from trioserve import (
    EngineDeadError,
    EngineGenerateError,
    InvalidRequestError,
    PairPrompt,
    PoolingParams,
    PromptTooLongError,
    TextPrompt,
)
from trioserve.config import Pooler, PoolerConfig
from trioserve.frontend.prompts import Truncation
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trioserve.outputs import PoolingOutput

TEXTS = ["one", "two, longer", "three"]


@pytest.fixture
def open_pooling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractAsyncContextManager[FakeEngine]]:
    @asynccontextmanager
    async def open_it(
        pooler: Pooler = EMBEDDER, *, model: dict[str, Any] | None = None, **args: Any
    ) -> AsyncIterator[FakeEngine]:
        resolved = pooling_model(tmp_path, pooler, **(model or {}))
        async with open_fake_llm(tmp_path, monkeypatch, model=resolved, **args) as engine:
            yield engine

    return open_it


def expected(text: str, task: str = "embed", pooler: Pooler = EMBEDDER, **params: Any) -> np.ndarray:
    return hash_of(list(text.encode()), [], PoolingParams(task=task, **params), pooler)


def assert_is(output: PoolingOutput, values: np.ndarray) -> None:
    assert np.array_equal(np.array(output.tolist(), dtype=np.float32), values)


async def test_results_come_in_the_order_of_the_prompts(open_pooling: Any) -> None:
    async with open_pooling() as fake:
        outputs = await fake.llm.encode_many(TEXTS, request_id="r")
        assert [output.request_id for output in outputs] == ["r-0", "r-1", "r-2"]
        for text, output in zip(TEXTS, outputs, strict=True):
            assert list(output.prompt_token_ids) == list(text.encode())
            assert_is(output.outputs, expected(text))
        assert await fake.llm.encode_many([]) == []


async def test_a_request_for_one_text_has_its_own_name(open_pooling: Any) -> None:
    async with open_pooling() as fake:
        output = await fake.llm.encode([1, 2], PoolingParams(task="token_embed"), request_id="r")
        assert output.request_id == "r"
        assert output.outputs.num_rows == 2
        assert_is(output.outputs, hash_of([1, 2], [], PoolingParams(task="token_embed"), EMBEDDER))


@pytest.mark.parametrize("task", ["classify", "token_classify"])
async def test_what_the_model_does_not_have_is_refused_with_what_it_has(open_pooling: Any, task: str) -> None:
    async with open_pooling() as fake:
        with pytest.raises(InvalidRequestError, match="supports embed, token_embed, score") as caught:
            await fake.llm.encode("text", PoolingParams(task=task))
        assert caught.value.parameter == "task"
        with pytest.raises(InvalidRequestError, match="supports embed, token_embed, score"):
            await fake.llm.complete("text")
        with pytest.raises(InvalidRequestError, match="supports embed, token_embed, score"):
            async with fake.llm.stream("text"):
                pass


async def test_a_model_that_generates_pools_nothing(fake: FakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="supports generate"):
        await fake.llm.encode("text")
    with pytest.raises(InvalidRequestError, match="supports generate"):
        await fake.llm.encode("text", PoolingParams(task="embed"))
    with pytest.raises(InvalidRequestError, match="supports generate"):
        await fake.llm.score("text", "other")


@pytest.mark.parametrize(
    ("allowed", "wanted", "message"),
    [
        (None, 4, "not set for this model"),
        ((), 9, "from 1 to 8, got 9"),
        ((2, 4), 3, "one of 2, 4, got 3"),
    ],
)
async def test_dimensions_are_those_that_the_model_allows(
    open_pooling: Any, allowed: tuple[int, ...] | None, wanted: int, message: str
) -> None:
    async with open_pooling(attrs.evolve(EMBEDDER, dimensions=allowed)) as fake:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await fake.llm.encode("text", PoolingParams(dimensions=wanted))
        assert caught.value.parameter == "dimensions"
        if allowed is not None:
            output = await fake.llm.encode("text", PoolingParams(dimensions=4))
            assert_is(output.outputs, expected("text", dimensions=4))


async def test_classes_have_no_dimensions(open_pooling: Any) -> None:
    async with open_pooling(CLASSIFIER) as fake:
        with pytest.raises(InvalidRequestError, match="not set for the task 'classify'"):
            await fake.llm.encode("text", PoolingParams(dimensions=4))
        output = await fake.llm.encode("text", PoolingParams(use_activation=False))
        assert_is(output.outputs, expected("text", "classify", CLASSIFIER, use_activation=False))


async def test_a_text_may_fill_the_context_and_no_more(open_pooling: Any) -> None:
    async with open_pooling() as fake:
        await fake.llm.encode("x" * 64)
        with pytest.raises(PromptTooLongError, match="context length is 64 tokens, and the prompt has 65"):
            await fake.llm.encode_many(["fine", "x" * 65])
        with pytest.raises(InvalidRequestError, match="The prompt is empty"):
            await fake.llm.encode("")
        assert len(fake.client.texts) == 1, "nothing was sent of a request with a wrong text"


async def test_truncation_leaves_one_end(open_pooling: Any) -> None:
    async with open_pooling() as fake:
        for keeps_end, left in ((True, "cde"), (False, "abc")):
            prompt = TextPrompt("abcde", truncation=Truncation(3, keeps_end=keeps_end))
            output = await fake.llm.encode(prompt)
            assert_is(output.outputs, expected(left))


async def test_the_model_s_own_prompt_goes_before_a_text(open_pooling: Any) -> None:
    prompts = {"query": "Q:", "document": "D:"}
    async with open_pooling(attrs.evolve(EMBEDDER, prompts=prompts, default_prompt="document")) as fake:
        for name, before in ((None, "D:"), ("query", "Q:"), ("", "")):
            output = await fake.llm.encode("text", prompt_name=name)
            assert_is(output.outputs, expected(before + "text"))
        with pytest.raises(InvalidRequestError, match=r"\(query, document\), got 'passage'"):
            await fake.llm.encode("text", prompt_name="passage")
        (score,) = await fake.llm.score("a", "b")
        assert score.outputs.score == pytest.approx(float(expected("Q:a") @ expected("D:b")), abs=1e-6)


async def test_texts_are_made_lower_case_where_the_model_wants_that(open_pooling: Any) -> None:
    async with open_pooling(attrs.evolve(EMBEDDER, lower_case=True)) as fake:
        assert_is((await fake.llm.encode("A Text")).outputs, expected("a text"))


async def test_a_long_text_is_averaged_from_its_pieces(open_pooling: Any) -> None:
    config = PoolerConfig(enable_chunked_processing=True, max_embed_len=150)
    async with open_pooling(pooler_config=config) as fake:
        text = "abcd" * 35
        output = await fake.llm.encode(text)
        pieces = [text[:64], text[64:128], text[128:]]
        average = sum(len(piece) / 140 * expected(piece).astype(np.float64) for piece in pieces)
        average /= np.linalg.norm(average)
        assert np.allclose(output.outputs.tolist(), average, atol=1e-6)
        assert len(output.prompt_token_ids) == 140
        with pytest.raises(InvalidRequestError, match=r"at most 150 tokens \(max_embed_len\), got 151"):
            await fake.llm.encode("x" * 151)
        with pytest.raises(PromptTooLongError):
            await fake.llm.encode(text, PoolingParams(task="token_embed"))


# Ends


async def test_leaving_the_scope_ends_all_texts(open_pooling: Any, nursery: trio.Nursery) -> None:
    async with open_pooling() as fake:
        fake.client.pools_as = None
        with trio.CancelScope() as scope:
            nursery.start_soon(_cancel_when_blocked, scope)
            await fake.llm.encode_many(TEXTS)
        assert scope.cancelled_caught
        assert fake.client.aborted == [text.request_id for text in fake.client.texts]
        assert fake.llm.num_open_requests == fake.llm._outputs.admission.num_open == 0


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


async def test_a_text_that_fails_ends_its_request_and_no_other(
    open_pooling: Any, nursery: trio.Nursery
) -> None:
    async with open_pooling() as fake:
        fake.client.pools_as = None
        results: dict[str, object] = {}

        async def ask(name: str, prompts: Sequence[str]) -> None:
            try:
                results[name] = await fake.llm.encode_many(prompts)
            except EngineGenerateError as error:
                results[name] = error

        nursery.start_soon(ask, "fails", TEXTS)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, "goes on", ["other"])
        await wait_all_tasks_blocked()
        first, second, third, other = fake.client.texts
        fake.client.emit_pooled(second, None, FinishReason.ERROR)
        await wait_all_tasks_blocked()
        assert isinstance(results["fails"], EngineGenerateError)
        assert fake.client.aborted == [first.request_id, third.request_id]
        fake.client.emit_pooled(other, np.ones(8, dtype=np.float32))
        await wait_all_tasks_blocked()
        assert isinstance(results["goes on"], list)


@pytest.mark.parametrize("end", ["abort", "death", "refusal"])
async def test_what_ends_a_request_is_raised_in_it(
    open_pooling: Any, nursery: trio.Nursery, end: str
) -> None:
    ends: dict[str, tuple[type[Exception], str]] = {
        "abort": (EngineGenerateError, "the request was aborted"),
        "death": (EngineDeadError, "killed by the test"),
        "refusal": (InvalidRequestError, "not like this"),
    }

    async def act() -> None:
        await wait_all_tasks_blocked()
        fake.client.emit_pooled(fake.client.texts[0], np.ones(8, dtype=np.float32))
        await wait_all_tasks_blocked()
        match end:
            case "abort":
                fake.llm.abort("r")
            case "death":
                fake.client.die()
            case "refusal":
                fake.client.refuse(fake.client.texts[1], "not like this", "dimensions")

    async with open_pooling() as fake:
        fake.client.pools_as = None
        nursery.start_soon(act)
        kind, message = ends[end]
        with pytest.raises(kind, match=message):
            await fake.llm.encode_many(TEXTS, request_id="r")
        assert fake.llm.num_open_requests == 0


async def test_admission_counts_each_text(open_pooling: Any, nursery: trio.Nursery) -> None:
    async with open_pooling(max_num_seqs=2, max_num_queued_reqs=1) as fake:
        with pytest.raises(InvalidRequestError, match="at most 3 at a time"):
            await fake.llm.encode_many(["a", "b", "c", "d"])
        fake.client.pools_as = None
        nursery.start_soon(fake.llm.encode_many, TEXTS)
        await wait_all_tasks_blocked()
        assert fake.llm._outputs.admission.num_open == 3
        for text in fake.client.texts:
            fake.client.emit_pooled(text, np.ones(8, dtype=np.float32))
        await wait_all_tasks_blocked()
        assert fake.llm._outputs.admission.num_open == 0


async def test_metrics_count_each_text(open_pooling: Any) -> None:
    async with open_pooling() as fake:
        await fake.llm.encode_many(["12", "1234"])
        shown = fake.llm.metrics.render().decode()
        assert 'request_success_total{engine="0",finished_reason="stop",model_name="fake"} 2.0' in shown
        assert 'request_prompt_tokens_sum{engine="0",model_name="fake"} 6.0' in shown


# Scores


async def test_a_cross_encoder_scores_pairs(open_pooling: Any) -> None:
    async with open_pooling(CROSS_ENCODER) as fake:
        scores = await fake.llm.score("a", ["b", "c"])
        for document, score in zip(("b", "c"), scores, strict=True):
            value = expected("a" + document, "classify", CROSS_ENCODER)[0]
            assert score.outputs.score == pytest.approx(float(value), abs=1e-7)
        output = await fake.llm.encode(PairPrompt("a", "b"))
        assert output.outputs.tolist() == [scores[0].outputs.score]
        with pytest.raises(InvalidRequestError, match="token ids cannot be made into a pair"):
            await fake.llm.score([1, 2], "b")


async def test_embeddings_are_scored_by_their_cosine(open_pooling: Any) -> None:
    async with open_pooling(attrs.evolve(EMBEDDER, normalizes=False)) as fake:
        scores = await fake.llm.score(["a", "b"], ["c", "d"])
        for query, document, score in zip("ab", "cd", scores, strict=True):
            x, y = (expected(text, use_activation=False).astype(np.float64) for text in (query, document))
            cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
            assert score.outputs.score == pytest.approx(cosine, abs=1e-12)
            assert list(score.prompt_token_ids) == [ord(query), ord(document)]


@pytest.mark.parametrize(
    ("similarity", "reference"),
    [
        ("dot", lambda x, y: x @ y),
        ("euclidean", lambda x, y: -math.dist(x, y)),
        ("manhattan", lambda x, y: -sum(abs(x - y))),
    ],
)
async def test_a_model_may_name_another_similarity(
    open_pooling: Any, similarity: Any, reference: Callable[[Any, Any], float]
) -> None:
    async with open_pooling(attrs.evolve(EMBEDDER, normalizes=False, similarity=similarity)) as fake:
        (score,) = await fake.llm.score("a", "b")
        x, y = (expected(text, use_activation=False).astype(np.float64) for text in "ab")
        assert score.outputs.score == pytest.approx(reference(x, y), abs=1e-12)


async def test_token_embeddings_are_scored_by_the_sum_of_their_best_products(open_pooling: Any) -> None:
    async with open_pooling() as fake:
        (score,) = await fake.llm.score("abc", "defgh", PoolingParams(task="token_embed"))
        x, y = (expected(text, "token_embed").astype(np.float64) for text in ("abc", "defgh"))
        best = [max(float(own @ other) for other in y) for own in x]
        assert score.outputs.score == pytest.approx(sum(best), abs=1e-12)


async def test_queries_and_documents_must_fit_each_other(open_pooling: Any) -> None:
    async with open_pooling() as fake:
        for queries, documents in ((["a", "b"], "c"), (["a", "b"], ["c", "d", "e"]), ("a", [])):
            with pytest.raises(InvalidRequestError, match="one query for all documents, or one for each"):
                await fake.llm.score(queries, documents)
    async with open_pooling(CLASSIFIER) as fake:
        with pytest.raises(InvalidRequestError, match="does not support task 'score'"):
            await fake.llm.score("a", "b")
