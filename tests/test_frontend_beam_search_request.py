"""A beam search as a request: what the engine is asked, what comes back, and every way in which it ends."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from byte_tokenizer import EOS, VOCAB_SIZE
from fake_engine import FakeEngine, open_fake_llm
from helpers_beam_search import Model, log_softmax, random_model, row_of, search, tokens_of
from trioserve import BeamSearchParams, SamplingParams
from trioserve.errors import EngineDeadError, EngineGenerateError, InvalidRequestError
from trioserve.outputs import FinishReason
from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.worker.batch import SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trioserve.link.messages import Add, Refused, StepOutputs


class Brain:
    """Answers every request of one token with a model's logprobs, until it is told to stop."""

    def __init__(self, engine: FakeEngine, model: Model) -> None:
        self.engine, self.model = engine, model
        self.steps_left = 10**6
        self.ending: Callable[[Add], None] = lambda _: None
        """What happens to requests when no step is left: nothing."""
        self._add = engine.client.add
        engine.client.add = self.add  # type: ignore[method-assign]

    def add(self, add: Add) -> None:
        self._add(add)
        if self.steps_left <= 0:
            self.ending(add)
            return
        self.steps_left -= 1
        logprobs = log_softmax(self.model(array("i", add.prompt_token_ids).tolist()))
        assert add.params.logprobs is not None
        row = row_of(logprobs, VOCAB_SIZE if add.params.logprobs < 0 else add.params.logprobs)
        self.engine.client.emit(add, [SampledToken(row.token_ids[0], row)], FinishReason.LENGTH)


def few_letters(seed: int = 0) -> Model:
    """Of the byte vocabulary, only a to d and EOS are likely."""
    few = random_model(5, seed)

    def logits(tokens: Sequence[int]) -> np.ndarray:
        everything = np.full(VOCAB_SIZE, -50.0)
        everything[[*b"abcd", EOS]] = few(tokens)
        return everything

    return logits


PARAMS = BeamSearchParams(beam_width=3, max_tokens=6)


@pytest.mark.parametrize("prompt", ["hé", {"prompt_token_ids": list("hé".encode())}])
@pytest.mark.parametrize("include_stop", [False, True])
async def test_the_results_have_texts_logprobs_and_reasons(
    fake: FakeEngine, prompt: Any, include_stop: bool
) -> None:
    Brain(fake, few_letters())
    params = BeamSearchParams(beam_width=3, max_tokens=6, include_stop_str_in_output=include_stop)
    output = await fake.llm.beam_search(prompt, params, request_id="mine", cache_salt="s", priority=4)
    ids = list("hé".encode())
    expected = search(few_letters(), ids, params, [EOS]).finished
    assert {beam.finish_reason for beam in expected} == {FinishReason.STOP, FinishReason.LENGTH}
    assert output.request_id == "mine"
    assert output.prompt == ("hé" if isinstance(prompt, str) else None)
    assert output.prompt_token_ids == ids
    assert len(output.sequences) == 3
    for sequence, beam in zip(output.sequences, expected, strict=True):
        with_eos = tokens_of(beam, ids)
        ends = beam.finish_reason is FinishReason.STOP
        shown = with_eos[:-1] if ends and not include_stop else with_eos
        assert sequence.output_token_ids == shown
        assert sequence.tokens == ids + shown
        assert sequence.output_text == bytes(token for token in shown if token != EOS).decode()
        assert sequence.text == "hé" + sequence.output_text
        assert sequence.finish_reason is beam.finish_reason
        assert sequence.stop_reason == (EOS if ends else None)
        assert sequence.score == pytest.approx(beam.score)
        chosen = [
            position[token].logprob for position, token in zip(sequence.logprobs, with_eos, strict=True)
        ]
        assert math.fsum(chosen) == pytest.approx(sequence.cum_logprob, abs=1e-5)
        assert [next(iter(position)) for position in sequence.logprobs] == with_eos
        assert {len(position) for position in sequence.logprobs} == {6}
    assert {(add.cache_salt, add.priority, add.streams) for add in fake.client.added} == {("s", 4, False)}
    assert {add.params.max_tokens for add in fake.client.added} == {1}
    assert {add.params.reads_prefix_cache for add in fake.client.added} == {True}


def count_requests(fake: FakeEngine) -> dict[str, float]:
    return {
        sample.labels["finished_reason"]: sample.value
        for family in text_string_to_metric_families(fake.llm.metrics.render().decode())
        for sample in family.samples
        if sample.name == "trioserve:request_success_total" and sample.value
    }


async def test_a_search_is_one_request_for_the_metrics(fake: FakeEngine) -> None:
    Brain(fake, few_letters())
    output = await fake.llm.beam_search("x", PARAMS)
    assert len(fake.client.added) > 3
    assert count_requests(fake) == {str(output.sequences[0].finish_reason): 1}


async def test_a_cancelled_search_releases_everything(fake: FakeEngine) -> None:
    brain = Brain(fake, few_letters())
    brain.steps_left = 4  # one for the prompt, three for its beams
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.llm.beam_search, "x", PARAMS)
            await wait_all_tasks_blocked()
            assert fake.llm.num_open_requests == 1
            scope.cancel()
    assert fake.llm.num_open_requests == 0
    open_ones = [add.request_id for add in fake.client.added[4:]]
    assert open_ones
    assert fake.client.aborted == open_ones
    assert count_requests(fake) == {"abort": 1}


class AtStep(trio.abc.Instrument):
    """Acts before a task's step of this number, counted from 1."""

    def __init__(self, task_name: str, number: int, act: Callable[[], object]) -> None:
        self._task_name, self._act = task_name, act
        self.steps_left = number

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name.endswith(self._task_name):
            self.steps_left -= 1
            if self.steps_left == 0:
                self._act()


@pytest.mark.parametrize("how", ["cancel", "abort", "die"])
@pytest.mark.parametrize("number", range(1, 8))
async def test_whatever_ends_it_at_any_moment_it_is_one_ended_request(
    fake: FakeEngine, how: str, number: int
) -> None:
    Brain(fake, few_letters())
    scope = trio.CancelScope()
    act = {"cancel": scope.cancel, "abort": lambda: fake.llm.abort("mine"), "die": fake.client.die}[how]
    ending = AtStep("run_search", number, act)
    ends: list[FinishReason | type[Exception]] = []

    async def run_search() -> None:
        try:
            output = await fake.llm.beam_search("x", PARAMS, request_id="mine")
        except EngineDeadError as error:
            ends.append(type(error))
        else:
            ends.append(output.sequences[0].finish_reason)

    trio.lowlevel.add_instrument(ending)
    with scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_search)
    trio.lowlevel.remove_instrument(ending)
    await wait_all_tasks_blocked()
    assert ending.steps_left <= 0
    assert fake.llm.num_open_requests == 0
    assert sum(count_requests(fake).values()) == 1
    adds = [add.request_id for add in fake.client.added]
    assert set(fake.client.aborted) <= set(adds)
    if scope.cancelled_caught:
        assert ends == []
        assert fake.client.aborted == adds[len(adds) - len(fake.client.aborted) :]
    else:
        assert len(ends) == 1


async def test_an_abort_ends_it_with_the_beams_as_they_are(fake: FakeEngine) -> None:
    brain = Brain(fake, few_letters())
    brain.steps_left = 1

    async def abort() -> None:
        await wait_all_tasks_blocked()
        fake.llm.abort("mine")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort)
        output = await fake.llm.beam_search("x", PARAMS, request_id="mine")
    unfinished = [s for s in output.sequences if s.finish_reason is FinishReason.ABORT]
    assert unfinished
    assert {len(sequence.output_token_ids) for sequence in unfinished} == {1}
    assert sorted(fake.client.aborted) == [add.request_id for add in fake.client.added[1:]]


async def test_an_abort_between_two_rounds_is_not_lost(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round has ended, and its consumer has not run yet."""
    Brain(fake, few_letters())
    outputs = fake.llm._outputs
    process = outputs.process

    def process_and_abort(message: StepOutputs | Refused) -> list[int]:
        to_abort = process(message)
        fake.llm.abort("mine")
        return to_abort

    monkeypatch.setattr(outputs, "process", process_and_abort)
    fake.client.emit_step([])  # the reader has taken hold of the method for its next message already
    await wait_all_tasks_blocked()
    with trio.fail_after(5):
        output = await fake.llm.beam_search("x", PARAMS, request_id="mine")
    assert FinishReason.ABORT in {sequence.finish_reason for sequence in output.sequences}
    assert len(fake.client.added) == 1


@pytest.mark.parametrize("reason", [FinishReason.DEADLINE, FinishReason.ERROR])
async def test_how_a_step_that_goes_wrong_ends_it(fake: FakeEngine, reason: FinishReason) -> None:
    brain = Brain(fake, few_letters())
    brain.steps_left = 1
    brain.ending = lambda add: fake.client.emit(add, (), reason)
    if reason is FinishReason.ERROR:
        with pytest.raises(EngineGenerateError):
            await fake.llm.beam_search("x", PARAMS)
    else:
        output = await fake.llm.beam_search("x", PARAMS)
        assert reason in {sequence.finish_reason for sequence in output.sequences}
    assert count_requests(fake) == {str(reason): 1}


async def test_the_engines_death_ends_it(fake: FakeEngine) -> None:
    brain = Brain(fake, few_letters())
    brain.steps_left = 1
    brain.ending = lambda _: fake.client.die("out of memory")
    with pytest.raises(EngineDeadError, match="out of memory"):
        await fake.llm.beam_search("x", PARAMS)


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ("x", {"structured_outputs": StructuredOutputsParams(json_object=True)}, "structured_outputs"),
        ("x", {"temperature": 0.7}, "temperature"),
        ("x", {"max_tokens": 128}, "prompt"),
        ("", {}, "prompt"),
    ],
)
async def test_what_cannot_be_searched_is_refused(
    fake: FakeEngine, prompt: str, params: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidRequestError, match=parameter) as caught:
        await fake.llm.beam_search(prompt, BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **params}))
    assert caught.value.parameter == parameter
    assert fake.client.added == []
    assert fake.llm.num_open_requests == 0


async def test_a_temperature_needs_an_engine_that_gives_all_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.5)
    async with open_fake_llm(tmp_path, monkeypatch, max_logprobs=-1) as fake:
        Brain(fake, few_letters(3))
        output = await fake.llm.beam_search("x", params)
    expected = search(few_letters(3), list(b"x"), params, [EOS]).finished
    assert [sequence.score for sequence in output.sequences] == pytest.approx([b.score for b in expected])
    assert {len(position) for sequence in output.sequences for position in sequence.logprobs} == {4}


async def test_wide_beams_may_have_more_logprobs_than_clients(fake: FakeEngine) -> None:
    Brain(fake, few_letters())
    await fake.llm.beam_search("x", BeamSearchParams(beam_width=20, max_tokens=2))
    assert {add.params.logprobs for add in fake.client.added} == {40}
    with pytest.raises(InvalidRequestError, match="logprobs"):
        await fake.llm.complete("x", SamplingParams(logprobs=40))
