"""Greedy output equals transformers' on the same weights, token for token in float32, however it is run.

Steps are planned ahead throughout, except where a test says otherwise.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import trio

from helpers_model_sources import TransformersReference, packaged_model
from helpers_worker import PagedModel
from trioserve import AsyncLLM, EngineArgs, SamplingParams

_TEXTS = [
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

_LONG_TEXT = " ".join(f"Line {number}: {text}" for number, text in enumerate((_TEXTS * 3)[:46]))


@attrs.frozen(kw_only=True)
class Case:
    """A model, and how much of it is compared."""

    model: str
    texts: list[str]
    length: int
    room: dict[str, Any]
    """Arguments that leave too little room for all, and little of a step for each prompt."""


CASES = [
    Case(
        model="smollm2-135m",
        texts=_TEXTS,
        length=64,
        room={"max_model_len": 256, "kv_cache_memory": "20MiB", "max_num_batched_tokens": 24},
    ),
    # Longer than its windows of 512 tokens, so that they leave blocks behind.
    Case(
        model="gemma3-270m",
        texts=[_LONG_TEXT, _LONG_TEXT[7:], _TEXTS[0]],
        length=12,
        room={"max_model_len": 1024, "kv_cache_memory": "30MiB", "max_num_batched_tokens": 200},
    ),
    Case(
        model="qwen2.5-coder-0.5b",
        texts=[*_TEXTS[:2], _TEXTS[6]],
        length=16,
        # As much as there is beside decodes, or the first would have ended before the last needs its room.
        room={
            "max_model_len": 64,
            "kv_cache_memory": "2MiB",
            "max_num_batched_tokens": 9,
            "prefill_beside_decodes": 9,
        },
    ),
]
ALONE = 2
"""Prompts that are run one after the other, too."""
TEXTS_BY_TORCH = [_TEXTS[0], _TEXTS[2], _TEXTS[12]]
LENGTH_BY_TORCH = 8
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


class Judge:
    """Knows a case's prompts, and whether outputs are what transformers would say."""

    def __init__(self, case: Case) -> None:
        self.model = packaged_model(case.model)
        self.reference = TransformersReference(self.model)
        self._eos_token_ids = self.model.eos_token_ids
        self._length = case.length
        self.prompts = [self.reference.encode(text) for text in case.texts]
        self._outputs: list[list[int]] = [[] for _ in self.prompts]

    def check(self, outputs: list[list[int]]) -> None:
        """Those of the first prompts, as many as there are."""
        for number, output in enumerate(outputs):
            if output == self._outputs[number]:
                continue  # known to be right
            ended = output[-1] in self._eos_token_ids
            assert len(output) == self._length or ended
            assert not set(output[:-1]) & set(self._eos_token_ids)
            assert output == self.reference.likeliest(self.prompts[number], output)
            self._outputs[number] = output


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.model)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def judge(case: Case) -> Judge:
    return Judge(case)


def new_llm(case: Case, **values: Any) -> AsyncLLM:
    args = {"model": case.model, "dtype": "float32", "threads": 1, "log": {"stats_interval": 0}, **values}
    return AsyncLLM.from_engine_args(EngineArgs.from_dict(args))


async def generate(llm: AsyncLLM, case: Case, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=case.length)
    output = await llm.complete({"prompt_token_ids": prompt}, params)
    return list(output.outputs[0].token_ids)


async def generate_all(
    llm: AsyncLLM, case: Case, prompts: list[list[int]], *, within: float = 0.0
) -> list[list[int]]:
    """All prompts together, each arriving at a random time within so many seconds."""
    arrivals = random.Random(1)
    outputs: dict[int, list[int]] = {}

    async def generate_one(number: int, delay: float) -> None:
        await trio.sleep(delay)
        outputs[number] = await generate(llm, case, prompts[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(prompts)):
            nursery.start_soon(generate_one, number, arrivals.uniform(0, within))
    return [outputs[number] for number in range(len(prompts))]


async def test_alone_then_in_a_batch_that_grows_then_with_prefix_hits(case: Case, judge: Judge) -> None:
    async with new_llm(case) as llm:
        judge.check([await generate(llm, case, prompt) for prompt in judge.prompts[:ALONE]])
        await llm.reset_prefix_cache()
        judge.check(await generate_all(llm, case, judge.prompts, within=1.0))
        # Every prompt's full blocks are in the prefix cache now.
        longest = max(judge.prompts, key=len)
        again = await llm.complete({"prompt_token_ids": [*longest, *longest]}, SamplingParams(max_tokens=1))
        assert again.num_cached_tokens > 0 or len(longest) <= llm.ready.block_size
        judge.check(await generate_all(llm, case, judge.prompts))


@pytest.mark.parametrize("mode", [{}, {"speculative_config": NGRAM}], ids=["plain", "speculative"])
async def test_with_chunked_prefill_and_preemption(case: Case, judge: Judge, mode: dict[str, Any]) -> None:
    await preempt(case, judge, mode)


@pytest.mark.parametrize("case", CASES[:1], indirect=True, ids=lambda case: case.model)
async def test_the_same_without_planning_ahead(case: Case, judge: Judge) -> None:
    await preempt(case, judge, {"async_scheduling": False, "enable_prefix_caching": False})


async def preempt(case: Case, judge: Judge, mode: dict[str, Any]) -> None:
    async with new_llm(case, **case.room, **mode) as llm:
        judge.check(await generate_all(llm, case, judge.prompts))
        assert llm.metrics.totals().preemptions > 0


def test_by_torch(judge: Judge) -> None:
    """The models' definition, with prompts in pieces of four tokens."""
    reference = judge.reference
    paged = PagedModel(judge.model, num_blocks=60, block_size=16)
    sequences = [paged.new_sequence(reference.encode(text)) for text in TEXTS_BY_TORCH]
    while any(len(sequence.output) < LENGTH_BY_TORCH for sequence in sequences):
        unfinished = [sequence for sequence in sequences if len(sequence.output) < LENGTH_BY_TORCH]
        paged.greedy([(sequence, 4) for sequence in unfinished])
    for sequence in sequences:
        assert sequence.output == reference.likeliest(sequence.prompt, sequence.output)
