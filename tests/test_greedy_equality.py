"""Greedy output equals transformers' on the same weights, token for token in float32, however it is run."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
import trio

from served import MODEL
from trioserve import AsyncLLM, EngineArgs, SamplingParams
from trioserve.model_sources import SilentProgress, resolve_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioserve.config import ResolvedModel

LENGTH = 64
PARAMS = SamplingParams(temperature=0, max_tokens=LENGTH)
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\ndef mean(values):\n",
    "Q: What is 12 times 12?\nA:",
    "To make a cup of tea, first",
    "The theory of evolution was proposed by",
    "In 1969, the first man walked on",
    "<html>\n<head>\n<title>",
    "Les enfants jouent dans",
    "My favourite book is",
    "The quick brown fox",
    "A recipe for pancakes:\n1.",
    "SELECT name, age FROM users WHERE",
    "The largest planet in the solar system is",
    "Photosynthesis is the process by which",
    "She opened the door and saw",
]


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    config = EngineArgs(model=MODEL, dtype="float32").create_engine_config()
    return resolve_model(config.model, SilentProgress())


@pytest.fixture(scope="module")
def expected(model: ResolvedModel) -> list[list[int]]:
    """What transformers gives, one prompt at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.tokenizer_directory)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            tokens = reference.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        outputs.append(tokens[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


def new_llm(**values: Any) -> AsyncLLM:
    args = {"model": MODEL, "dtype": "float32", "log": {"stats_interval": 0}, **values}
    return AsyncLLM.from_engine_args(EngineArgs.from_dict(args))


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with new_llm() as llm:
        yield llm


async def generate_all(llm: AsyncLLM, *, within: float = 0.0) -> list[list[int]]:
    """All prompts together, each arriving at a random time within so many seconds."""
    arrivals = random.Random(1)
    outputs: dict[int, list[int]] = {}

    async def generate(number: int, delay: float) -> None:
        await trio.sleep(delay)
        output = await llm.complete(PROMPTS[number], PARAMS)
        outputs[number] = list(output.outputs[0].token_ids)

    async with trio.open_nursery() as nursery:
        for number in range(len(PROMPTS)):
            nursery.start_soon(generate, number, arrivals.uniform(0, within))
    return [outputs[number] for number in range(len(PROMPTS))]


async def test_alone(llm: AsyncLLM, expected: list[list[int]]) -> None:
    outputs = [await llm.complete(prompt, PARAMS) for prompt in PROMPTS]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


async def test_in_a_batch_that_grows_and_with_prefix_hits(llm: AsyncLLM, expected: list[list[int]]) -> None:
    assert await generate_all(llm, within=2.0) == expected
    # Again, now that every prompt's full blocks are in the prefix cache; longer prompts share more.
    shared = [await llm.complete(PROMPTS[0] + " Paris." + " and so on" * 20, PARAMS) for _ in range(2)]
    assert shared[0].outputs[0].token_ids == shared[1].outputs[0].token_ids
    assert shared[1].num_cached_tokens > 0
    assert await generate_all(llm) == expected


async def test_with_chunked_prefill_and_preemption(expected: list[list[int]]) -> None:
    # Room for about five of the twenty, and four tokens of prompt at a time beside the decodes.
    room = {"max_model_len": 256, "kv_cache_memory": "20MiB", "max_num_batched_tokens": 24}
    async with new_llm(**room) as llm:
        assert await generate_all(llm) == expected
        assert llm.metrics.totals().preemptions > 0
