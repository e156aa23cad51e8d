"""`LLM.encode`, `embed`, `classify` and `score`, over the real engine core in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from hash_pooling import HashPoolingRunner, open_hash_pooling_llm
from helpers_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER, hash_of
from trioserve import EngineGenerateError, InvalidRequestError, PairPrompt, PoolingParams, SamplingParams
from trioserve.llm import LLM
from trioserve.llm_engine import LLMEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np

    from trioserve.async_llm import AsyncLLM
    from trioserve.config import Pooler

TEXTS = [f"text {number}" for number in range(10)]


@pytest.fixture
def open_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def open_one(pooler: Pooler = EMBEDDER, **args: Any) -> LLM:
        runner = HashPoolingRunner(pooler, fails_on=ord("!"))
        context = open_hash_pooling_llm(tmp_path, monkeypatch, runner, **args)
        opened.append(LLM.from_engine(LLMEngine(cast("AsyncLLM", context))))
        return opened[-1]

    yield open_one
    for llm in opened:
        assert llm._engine.get_num_unfinished_requests() == llm._engine._llm.num_open_requests == 0
        llm.close()


def expected(text: str, task: str = "embed", pooler: Pooler = EMBEDDER, **params: Any) -> np.ndarray:
    return hash_of(list(text.encode()), [], PoolingParams(task=task, **params), pooler)


class Bar:
    """In place of tqdm."""

    def __init__(self, total: int, **_: Any) -> None:
        self.total = total
        self.count = 0

    def update(self, number: int) -> None:
        self.count += number

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        assert text.startswith("est. speed input: ")

    def close(self) -> None:
        assert self.count == self.total


def test_embeddings_come_in_the_order_of_the_prompts_with_a_bar(open_llm: Callable[..., LLM]) -> None:
    llm, bars = open_llm(max_num_seqs=3), list[Bar]()

    def make_bar(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    outputs = llm.embed(TEXTS, use_tqdm=make_bar)
    assert [output.request_id for output in outputs] == [str(number) for number in range(10)]
    assert [output.outputs.embedding for output in outputs] == [expected(text).tolist() for text in TEXTS]
    assert [bar.count for bar in bars] == [10]
    (one,) = llm.embed("a text", use_tqdm=False)
    assert one.outputs.embedding == expected("a text").tolist()
    assert one.outputs.hidden_size == 8
    assert llm.embed([], use_tqdm=False) == []


def test_params_and_priorities_may_differ(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(scheduling_policy="priority")
    params = [PoolingParams(), PoolingParams(dimensions=4), PoolingParams(task="token_embed")]
    outputs = llm.encode(TEXTS[:3], params, priority=[2, 1, 0], use_tqdm=False)
    wanted = [expected(TEXTS[0]), expected(TEXTS[1], dimensions=4), expected(TEXTS[2], "token_embed")]
    for output, values in zip(outputs, wanted, strict=True):
        assert output.outputs.tolist() == values.tolist()
    for name, lists in (("pooling_params", {"pooling_params": params[:2]}), ("priority", {"priority": [1]})):
        with pytest.raises(ValueError, match=rf"prompts \(3\) and {name} \(\d\) must be the same"):
            llm.encode(TEXTS[:3], **lists)
    with pytest.raises(InvalidRequestError, match="must be not set or 'embed' here, got 'token_embed'"):
        llm.embed(TEXTS[:3], pooling_params=params)


def test_classes(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(CLASSIFIER)
    (one, pair) = llm.classify(["a text", PairPrompt("one", "two")], use_tqdm=False)
    assert one.outputs.probs == expected("a text", "classify", CLASSIFIER).tolist()
    assert one.outputs.num_classes == len(pair.outputs.probs) == 3
    with pytest.raises(ValueError, match="task 'embed': it supports classify, token_classify"):
        llm.embed("a text", use_tqdm=False)
    with pytest.raises(ValueError, match="does not support task 'score'"):
        llm.score("a", "b", use_tqdm=False)


def test_scores(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(CROSS_ENCODER, max_num_seqs=3)
    for queries, documents in (("a", TEXTS), (TEXTS[::-1], TEXTS)):
        scores = llm.score(queries, documents, use_tqdm=False)
        for query, document, score in zip(queries * 10, documents, scores, strict=False):
            value = expected(query + document, "classify", CROSS_ENCODER)[0]
            assert score.outputs.score == pytest.approx(float(value), abs=1e-7)
        assert len(scores) == 10
    with pytest.raises(ValueError, match="2 queries and 10 documents"):
        llm.score(["a", "b"], TEXTS)


def test_too_long_a_text_is_an_error_or_truncated(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    with pytest.raises(ValueError, match="context length is 64 tokens"):
        llm.embed([*TEXTS, "x" * 65], use_tqdm=False)
    for wanted, length in ((-1, 64), (5, 5)):
        texts = ["x" * 100, list(b"x" * 100), "x"]
        outputs = llm.embed(texts, truncate_prompt_tokens=wanted, use_tqdm=False)
        assert [len(output.prompt_token_ids) for output in outputs] == [length, length, 1]
        assert outputs[0].outputs.embedding == expected("x" * length).tolist()
    with pytest.raises(ValueError, match="-1 or an integer from 1 to 64, the model's context, got 65"):
        llm.embed(TEXTS, truncate_prompt_tokens=65)


def test_a_text_that_fails_ends_the_call_and_the_next_one_is_fine(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm(max_num_seqs=2)
    with pytest.raises(EngineGenerateError):
        llm.embed([*TEXTS, "!", *TEXTS], use_tqdm=False)
    assert llm._engine._llm.num_open_requests == 0
    assert len(llm.embed(TEXTS, use_tqdm=False)) == 10


def test_a_model_that_pools_does_not_generate(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    for call in (llm.generate, llm.enqueue):
        with pytest.raises(ValueError, match=r"Call LLM\.embed, LLM\.classify, LLM\.score or LLM\.encode"):
            call(TEXTS, SamplingParams())
