"""What is drawn and what is reported about it, by the real model in the real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio

from helpers_model_sources import TransformersReference, packaged_model
from served import MODEL, STEADY
from trioserve import AsyncLLM, EngineArgs, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trioserve import RequestOutput
    from trioserve.outputs import Logprob

TOLERANCE = 1e-3
CHORUS = "Row, row, row your boat, gently down the stream. Merrily, merrily, merrily, life is but a dream. "
LONG_TEXT = " ".join(f"{number}. The {word} is older than the sea." for number, word in enumerate(
    ["stone", "river", "cloud", "wind", "light", "forest", "hill", "sand", "star", "rain"] * 2
))  # fmt: skip

SEEDED: list[tuple[str, SamplingParams]] = [
    (CHORUS * 3, SamplingParams(max_tokens=24, ignore_eos=True, seed=1, top_p=0.9)),
    (CHORUS * 2, SamplingParams(max_tokens=24, ignore_eos=True, seed=2, top_k=50, frequency_penalty=0.5)),
    ("A list of colours: red, green,", SamplingParams(max_tokens=24, ignore_eos=True, seed=3, min_p=0.02)),
]


def new_llm(**values: Any) -> AsyncLLM:
    args = {"model": MODEL, "dtype": "float32", "threads": 1, "log": {"stats_interval": 0}, **values}
    return AsyncLLM.from_engine_args(EngineArgs.from_dict(args))


async def run_together(llm: AsyncLLM, requests: Sequence[tuple[str, SamplingParams]]) -> list[list[int]]:
    outputs: dict[int, list[int]] = {}

    async def run(number: int, prompt: str, params: SamplingParams) -> None:
        outputs[number] = list((await llm.complete(prompt, params)).outputs[0].token_ids)

    async with trio.open_nursery() as nursery:
        for number, request in enumerate(requests):
            nursery.start_soon(run, number, *request)
    return [outputs[number] for number in range(len(requests))]


async def test_a_seeded_output_is_the_same_alone_and_among_31_others_and_with_speculation() -> None:
    others = [
        (f"Story {number}:", SamplingParams(max_tokens=8 + number % 16, temperature=1.3))
        for number in range(32 - len(SEEDED))
    ]
    seen = []
    for speculation in (None, {"method": "ngram"}):
        async with new_llm(speculative_config=speculation, dtype=STEADY) as llm:
            seen += [[(await run_together(llm, [request]))[0] for request in SEEDED]]
            seen += [(await run_together(llm, [*SEEDED, *others]))[: len(SEEDED)]]
            assert (llm.metrics.totals().accepted_tokens > 0) == (speculation is not None)
    assert seen == [seen[0]] * 4


@pytest.fixture(scope="module")
def reference() -> TransformersReference:
    return TransformersReference(packaged_model(MODEL))


def check(
    reported: Sequence[Mapping[int, Logprob] | None],
    token_ids: Sequence[int],
    expected: np.ndarray,
    num_top: int,
) -> None:
    """Each position has its own token, and the most likely ones in order, with the values of `expected`."""
    assert len(reported) == len(token_ids) == len(expected)
    for position, token, row in zip(reported, token_ids, expected, strict=True):
        assert position is not None
        assert token in position
        assert num_top <= len(position) <= num_top + 1
        logprobs = [entry.logprob for entry in position.values()]
        np.testing.assert_allclose(logprobs, row[list(position)], rtol=0, atol=TOLERANCE)
        ranked = sorted(position.values(), key=lambda entry: entry.rank)[:num_top]
        assert all(entry.rank <= place for place, entry in enumerate(ranked, 1))  # equal ones share a rank
        likeliest = np.sort(row)[::-1][:num_top]
        np.testing.assert_allclose([entry.logprob for entry in ranked], likeliest, rtol=0, atol=TOLERANCE)


def check_output(output: RequestOutput, reference: TransformersReference, num_top: int) -> None:
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    expected = reference.logprobs([*prompt, *completion.token_ids])
    assert completion.logprobs is not None
    check(completion.logprobs, completion.token_ids, expected[len(prompt) - 1 :], num_top)
    if output.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        check(output.prompt_logprobs[1:], prompt[1:], expected[: len(prompt) - 1], num_top)


async def test_logprobs_are_transformers(reference: TransformersReference) -> None:
    sampled: dict[str, Any] = {"max_tokens": 12, "seed": 4, "ignore_eos": True, "logprobs": 5}
    async with new_llm(max_logprobs=-1, max_num_batched_tokens=48) as llm:  # so prompts come in chunks
        first = await llm.complete(LONG_TEXT, SamplingParams(**sampled))
        assert len(first.prompt_token_ids) > 3 * 48
        assert first.num_cached_tokens == 0
        check_output(first, reference, 5)

        again = await llm.complete(LONG_TEXT, SamplingParams(**sampled))
        assert again.num_cached_tokens > 48
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        check_output(again, reference, 5)

        of_the_prompt = await llm.complete(LONG_TEXT, SamplingParams(**sampled, prompt_logprobs=5))
        assert of_the_prompt.num_cached_tokens == 0
        assert of_the_prompt.prompt_logprobs is not None
        check_output(of_the_prompt, reference, 5)

        params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, prompt_logprobs=-1)
        check_output(await llm.complete("The sea", params), reference, llm.model.vocab_size)


async def test_logprobs_of_drafts_are_transformers(reference: TransformersReference) -> None:
    async with new_llm(speculative_config={"method": "ngram"}) as llm:
        params = SamplingParams(max_tokens=24, temperature=0, logprobs=3)
        output = await llm.complete(CHORUS * 3, params)
        assert llm.metrics.totals().accepted_tokens > 5
    check_output(output, reference, 3)
