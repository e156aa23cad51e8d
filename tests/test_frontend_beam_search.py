"""Beam search: against an exhaustive one, against transformers, and as a request on a scripted engine."""

from __future__ import annotations

import itertools
import math
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import trio
from prometheus_client.parser import text_string_to_metric_families
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from trio.testing import wait_all_tasks_blocked

from byte_tokenizer import EOS, VOCAB_SIZE
from fake_engine import FakeEngine, open_fake_llm
from trioserve import BeamSearchParams, SamplingParams
from trioserve.errors import EngineDeadError, EngineGenerateError, InvalidRequestError
from trioserve.frontend.beam_search import BeamSearch
from trioserve.outputs import FinishReason
from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from trioserve.frontend.beam_search import Beam
    from trioserve.link.messages import Add, Refused, StepOutputs

    Model = Callable[[Sequence[int]], np.ndarray]
    """Tokens -> float64 logits of the next one."""


def random_model(vocab_size: int, seed: int = 0) -> Model:
    """Logits that depend on all tokens, and are the same for the same ones."""

    def logits(tokens: Sequence[int]) -> np.ndarray:
        return np.random.default_rng([seed, len(tokens), *tokens]).normal(scale=2.0, size=vocab_size)

    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def row_of(logprobs: np.ndarray, number: int) -> LogprobRow:
    """As the sampler reports them: the sampled token, here the most likely one, and the top `number`."""
    order = np.argsort(-logprobs, kind="stable")
    chosen = [int(order[0]), *map(int, order[:number])]
    ranks = [1, *range(1, len(chosen))]
    return LogprobRow(chosen, [float(logprobs[token]) for token in chosen], ranks)


def search(model: Model, prompt: Sequence[int], params: BeamSearchParams, eos: Sequence[int]) -> BeamSearch:
    """Run it to the end."""
    found = BeamSearch(prompt, params, eos)
    number = 2 * params.beam_width if params.temperature in {0, 1} else 10**6
    while not found.is_done:
        rows = [
            row_of(log_softmax(model(array("i", beam.token_ids).tolist())), number) for beam in found.live
        ]
        found.advance(rows)
    return found


def tokens_of(beam: Beam, prompt: Sequence[int]) -> list[int]:
    return array("i", beam.token_ids).tolist()[len(prompt) :]


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.7])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_search_wide_enough_for_everything_finds_the_best_of_everything(
    length_penalty: float, temperature: float, ignore_eos: bool
) -> None:
    """3 tokens, one of them EOS, at most 4 of them: 1 + 2 + 4 + 8 ends with EOS, and 16 without."""
    model, prompt, eos, steps = random_model(3), [1], 0, 4
    params = BeamSearchParams(
        beam_width=64,
        max_tokens=steps,
        length_penalty=length_penalty,
        temperature=temperature,
        ignore_eos=ignore_eos,
    )
    expected: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(3), repeat=steps):
        end = tokens.index(eos) + 1 if eos in tokens and not ignore_eos else steps
        total = sum(
            log_softmax(model([*prompt, *tokens[:place]]) / (temperature or 1.0))[tokens[place]]
            for place in range(end)
        )
        expected[tokens[:end]] = total / end**length_penalty
    best = sorted(expected.items(), key=lambda item: -item[1])[:64]

    finished = search(model, prompt, params, [eos]).finished
    assert [tuple(tokens_of(beam, prompt)) for beam in finished] == [tokens for tokens, _ in best]
    assert [beam.score for beam in finished] == pytest.approx([score for _, score in best])
    for beam in finished:
        ends = tokens_of(beam, prompt)[-1] == eos and not ignore_eos
        assert beam.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight *= 60  # as decided as a trained model
    return model


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


def logits_of(llama: LlamaForCausalLM) -> Model:
    def logits(tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            return llama(torch.tensor([list(tokens)])).logits[0, -1].numpy()

    return logits


@pytest.mark.parametrize("beam_width", [2, 4])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("prompt", [[3], [7, 30, 2]])
def test_it_finds_what_transformers_finds(
    llama: LlamaForCausalLM, beam_width: int, length_penalty: float, prompt: list[int]
) -> None:
    eos = [0, 1, 5, 9, 14, 23]  # so that some sequences end
    settings = GenerationConfig(
        num_beams=beam_width,
        num_return_sequences=beam_width,
        do_sample=False,
        max_new_tokens=8,
        length_penalty=length_penalty,
        early_stopping="never",
        eos_token_id=eos,
        pad_token_id=39,
        return_dict_in_generate=True,
        output_scores=True,
    )
    theirs = llama.generate(torch.tensor([prompt]), generation_config=settings)
    expected = [
        list(itertools.takewhile(lambda token: token != 39, sequence))
        for sequence in theirs.sequences[:, len(prompt) :].tolist()
    ]
    params = BeamSearchParams(beam_width=beam_width, max_tokens=8, length_penalty=length_penalty)
    finished = search(logits_of(llama), prompt, params, eos).finished
    assert [tokens_of(beam, prompt) for beam in finished] == expected
    assert [beam.score for beam in finished] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
def test_a_width_of_one_is_greedy_decoding(seed: int, length_penalty: float) -> None:
    model, eos = random_model(6, seed), [2]
    tokens = [4]
    while len(tokens) < 13 and tokens[-1] not in eos:
        tokens.append(int(model(tokens).argmax()))
    params = BeamSearchParams(beam_width=1, max_tokens=12, length_penalty=length_penalty)
    (beam,) = search(model, [4], params, eos).finished
    assert array("i", beam.token_ids).tolist() == tokens


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0])
def test_stopping_early_changes_nothing(length_penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=16, length_penalty=length_penalty)
    saved = 0
    for seed in range(8):
        model = random_model(5, seed)
        early = search(model, [1], params, [0])
        with monkeypatch.context() as patch:
            patch.setattr(BeamSearch, "_is_settled", lambda _: False)
            late = search(model, [1], params, [0])
        assert [beam.token_ids for beam in early.finished] == [beam.token_ids for beam in late.finished]
        saved += late._length - early._length
    assert saved > 0


@pytest.mark.parametrize("length_penalty", [1e300, -1e300, 500.0, -500.0])
def test_no_length_penalty_is_too_much(length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=length_penalty)
    assert len(search(random_model(4), [1], params, [0]).finished) == 2


# As a request


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


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeEngine]:
    async with open_fake_llm(tmp_path, monkeypatch) as engine:
        yield engine


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
