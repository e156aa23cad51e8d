"""More logprobs than one message or one request can have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fake_engine import STATS, FakeEngine, open_fake_llm
from trioserve import SamplingParams
from trioserve.core.step_result import StepResult
from trioserve.errors import InvalidRequestError
from trioserve.frontend.input_processor import InputProcessor
from trioserve.link.columns import pack_step
from trioserve.link.framing import frame
from trioserve.link.messages import encode_message
from trioserve.link.step_parts import split_step
from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

VOCABULARY = range(262_144)


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeEngine]:
    async with open_fake_llm(tmp_path, monkeypatch, max_logprobs=-1) as engine:
        yield engine


def step_of(rows: list[list[LogprobRow]]) -> StepResult:
    """One request for each list: that many rows of its prompt, and a token."""
    size = len(rows)
    return StepResult(
        request_ids=list(range(size)),
        token_ids=[[7 + place] for place in range(size)],
        sampled=[[SampledToken(7 + place)] for place in range(size)],
        finish_reasons=[FinishReason.LENGTH if place % 2 else None for place in range(size)],
        stop_token_ids=[None] * size,
        num_cached_tokens=[0] * size,
        prompt_logprobs=rows,
    )


def test_a_step_with_too_many_logprobs_for_one_frame_is_sent_in_parts() -> None:
    whole = LogprobRow(VOCABULARY, [-1.0] * len(VOCABULARY), VOCABULARY)
    result = step_of([[whole] * 3 for _ in range(30)])  # 283 MB
    parts = list(split_step(result))
    assert [number for part in parts for number in part.request_ids] == list(range(30))
    assert [token for part in parts for tokens in part.token_ids for token in tokens] == list(range(7, 37))
    assert [reason for part in parts for reason in part.finish_reasons] == result.finish_reasons
    assert [rows for part in parts for rows in part.prompt_logprobs] == result.prompt_logprobs
    assert len(frame(encode_message(pack_step(parts[0], STATS)))) < 16 * 2**20


def test_an_ordinary_step_is_one_message() -> None:
    result = step_of([[LogprobRow([1], [-1.0], [1])], [], []])
    assert list(split_step(result)) == [result]
    empty = StepResult()
    assert list(split_step(empty)) == [empty]


async def test_logprobs_of_an_answer_travel_as_they_come_even_if_only_the_end_is_asked_for(
    fake: FakeEngine,
) -> None:
    params = SamplingParams(logprobs=1)
    async with trio.open_nursery() as nursery:

        async def consume() -> None:
            output = await fake.llm.complete("x", params)
            assert output.outputs[0].text == "ab"
            assert output.outputs[0].logprobs is not None
            assert [list(position) for position in output.outputs[0].logprobs] == [[97], [98]]

        nursery.start_soon(consume)
        await wait_all_tasks_blocked()
        (add,) = fake.client.added
        assert add.streams
        for token_id, reason in ((97, None), (98, FinishReason.LENGTH)):
            row = LogprobRow([token_id], [-0.5], [1])
            fake.client.emit(add, [SampledToken(token_id, row)], reason)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            SamplingParams(logprobs=-1, max_tokens=None),
            "logprobs of all tokens must be at most 16777216, got 118 tokens with 262145 each: ask for fewer "
            "of them, or for fewer tokens.",
        ),
        (SamplingParams(logprobs=-1, max_tokens=16, n=4), "logprobs of all tokens .* got 64 tokens"),
        (SamplingParams(prompt_logprobs=-1, max_tokens=1), "prompt_logprobs of all tokens .* got 100 tokens"),
    ],
)
async def test_a_request_has_so_many_logprobs_and_no_more(
    fake: FakeEngine, params: SamplingParams, message: str
) -> None:
    model = attrs.evolve(fake.llm.model, vocab_size=len(VOCABULARY))
    inputs = InputProcessor(fake.llm.config, model, fake.llm.tokenizer)
    prompt_length = 100 if params.prompt_logprobs else 10
    with pytest.raises(InvalidRequestError, match=message):
        inputs.fit_params(params, prompt_length)
    fewer = attrs.evolve(params, max_tokens=15, n=1)
    assert inputs.fit_params(fewer, 10) == fewer
