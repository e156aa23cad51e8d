"""Pooling by a real model in an engine core's process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import trio

from helpers_model_sources import packaged_model
from trioserve import AsyncLLM, EngineArgs, PoolingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trioserve.config import ResolvedModel

WORDS = Path(__file__).read_text().split()


def random_texts(count: int, longest: int) -> list[str]:
    """Of all lengths up to so many words, in no order."""
    source = random.Random(count)
    return [" ".join(source.choices(WORDS, k=1 + index * longest // count)) for index in range(count)]


@pytest.fixture
def model() -> ResolvedModel:
    return packaged_model("minilm-l6")


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM.from_engine_args(EngineArgs(model="minilm-l6")) as opened:
        yield opened
        assert opened.num_open_requests == 0


def reference_embeddings(model: ResolvedModel, texts: Sequence[str]) -> np.ndarray:
    """[len(texts), hidden]: what transformers, the mean and the norm make of each text by itself."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.directory)
    network = transformers.AutoModel.from_pretrained(model.directory).eval()
    rows = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=model.max_model_len, return_tensors="pt")
        with torch.inference_mode():
            mean = network(**inputs).last_hidden_state[0].mean(0)
        rows.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    return np.stack(rows)


async def embeddings(llm: AsyncLLM, texts: Sequence[str]) -> np.ndarray:
    outputs = await llm.encode_many(texts)
    return np.array([output.outputs.tolist() for output in outputs], dtype=np.float32)


async def test_embeddings_of_all_lengths_also_after_a_sleep(llm: AsyncLLM, model: ResolvedModel) -> None:
    texts = random_texts(40, longest=25)
    expected = reference_embeddings(model, texts)
    np.testing.assert_allclose(await embeddings(llm, texts), expected, atol=1e-5)
    query, document = expected[3].astype(np.float64), expected[5].astype(np.float64)
    (score,) = await llm.score(texts[3], texts[5])
    assert score.outputs.score == pytest.approx(float(query @ document), abs=1e-5)
    await llm.sleep(2)
    await llm.wake_up()
    np.testing.assert_allclose(await embeddings(llm, texts[:5]), expected[:5], atol=1e-5)


async def test_cancelled_texts_are_gone_from_the_engine_at_once(llm: AsyncLLM) -> None:
    texts = random_texts(400, longest=25)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.encode_many, texts, PoolingParams(task="token_embed"))
            while not llm.metrics.totals().prompt_tokens:  # noqa: ASYNC110 - it comes over a socket
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        await llm.wait_for_requests_to_drain(10)
    await llm.check_health()
    totals = llm.metrics.totals()
    assert (totals.running, totals.waiting, llm._outputs.num_unfreed) == (0, 0, 0)
    assert totals.prompt_tokens < sum(len(text.split()) for text in texts), "it was computed all the same"
    assert len(await embeddings(llm, texts[:3])) == 3
