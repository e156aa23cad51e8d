"""Beam searches over audio: against transformers', beside others, and interrupted in the middle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
import transformers

from helpers_whisper import features, noise, tiny_whisper
from helpers_worker import engine_config
from trioserve.audio_input import SpeechSearch
from trioserve.core.engine import EngineCore
from trioserve.core.request import CoreRequest, MultimodalKey
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams
from trioserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trioserve.audio_input import AudioInput
    from trioserve.config import ResolvedModel

pytestmark = pytest.mark.usefixtures("same_number_of_threads")

PROMPT = [3, 4]
EOS = (2, 54, 58, 87)
"""Enough of them that a random model comes to one."""
MOST = 24
NUM_BLOCKS = 4 * 16
GREEDY = SamplingParams(temperature=0, max_tokens=MOST, logprobs=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ResolvedModel]:
    directory = tmp_path_factory.mktemp("whisper")
    theirs, ours = tiny_whisper(directory)
    with torch.no_grad():  # else it says the same over and over, whatever it hears
        theirs.model.decoder.layer_norm.bias.zero_()
        theirs.model.decoder.embed_positions.weight.normal_(std=1.0)
        for layer in theirs.model.decoder.layers:
            layer.encoder_attn.out_proj.weight.mul_(10.0)
            layer.encoder_attn.q_proj.weight.mul_(10.0)
    theirs.save_pretrained(directory)
    generation = {"no_timestamps_token_id": 50, "eos_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return theirs, attrs.evolve(ours, eos_token_ids=EOS)


@pytest.fixture
def core(models: tuple[Any, ResolvedModel]) -> Iterator[EngineCore]:
    config = engine_config(threads=1, max_num_seqs=8)
    runner = ModelRunner(models[1], config)
    runner.allocate_kv_cache(NUM_BLOCKS)
    core = EngineCore.from_config(
        runner,
        config,
        models[1],
        num_blocks=NUM_BLOCKS,
        max_num_seqs=runner.max_num_seqs(NUM_BLOCKS) or 1,
    )
    yield core
    while core.schedule() is not None:
        raise AssertionError("a request is left")
    assert runner._executor.beam_pages.num_free == 5 * NUM_BLOCKS
    runner.close()


def search_of(audio: AudioInput, width: int = 5, penalty: float = 1.0) -> AudioInput:
    return attrs.evolve(audio, search=SpeechSearch(beam_width=width, length_penalty=penalty))


def request(number: int, audio: AudioInput, params: SamplingParams = GREEDY) -> CoreRequest:
    return CoreRequest(
        request_id=number,
        prompt_token_ids=PROMPT,
        params=params,
        seed=0,
        audio=audio,
        multimodal_keys=[MultimodalKey(position=0, length=len(PROMPT), digest=audio.digest)],
    )


def run(
    core: EngineCore, meanwhile: Callable[[int], None] = lambda _: None
) -> dict[int, tuple[list[int], FinishReason]]:
    """What is told of each request, and how it ended. `meanwhile` is called after each step."""
    told: dict[int, list[int]] = {}
    ended: dict[int, tuple[list[int], FinishReason]] = {}
    step = 0
    while (plan := core.schedule()) is not None:
        core.finish(plan, core.execute(plan))
        result = core.take_result()
        entries = zip(result.request_ids, result.token_ids, result.finish_reasons, strict=True)
        for number, tokens, reason in entries:
            told.setdefault(number, []).extend(tokens)
            if reason is not None:
                ended[number] = told[number], reason
        step += 1
        meanwhile(step)
    return ended


def expected(theirs: Any, audio: AudioInput, width: int, penalty: float) -> list[int]:
    found = transformers.GenerationMixin.generate(
        theirs,
        features(audio),
        decoder_input_ids=torch.tensor([PROMPT]),
        num_beams=width,
        early_stopping=True,
        length_penalty=penalty,
        max_new_tokens=MOST,
        do_sample=False,
        eos_token_id=list(EOS),
    )
    tokens: list[int] = found[0].tolist()
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (5, 1.0), (4, 1.5)])
def test_it_finds_what_transformers_finds(
    models: tuple[Any, ResolvedModel], core: EngineCore, width: int, penalty: float
) -> None:
    audios = [noise(seed) for seed in range(20, 26)]
    for number, audio in enumerate(audios):
        core.add(request(number, search_of(audio, width, penalty)))
    found = run(core)
    for number, audio in enumerate(audios):
        tokens, reason = found[number]
        assert tokens == expected(models[0], audio, width, penalty)
        assert reason is (FinishReason.STOP if tokens[-1] in EOS else FinishReason.LENGTH)
    lengths = {len(tokens) for tokens, _ in found.values()}
    assert len(lengths) > 2  # most end by themselves


def test_beside_others_and_interrupted_it_finds_the_same(core: EngineCore) -> None:
    audio, other = noise(20), noise(21)
    core.add(request(0, search_of(audio)))
    core.add(request(1, audio))
    alone = run(core)
    for number in (2, 3):
        core.add(request(number, search_of(audio)))
    core.add(request(4, search_of(other, 3)))
    core.add(request(5, audio))

    def interrupt(step: int) -> None:
        if step == 4:
            core.abort([3])
        if step == 6:
            assert core.reset_prefix_cache(preempt_running=True)

    found = run(core, interrupt)
    assert found.keys() == {2, 4, 5}
    assert (found[2], found[5]) == (alone[0], alone[1])
    assert found[2] != found[5]


def test_logprobs_are_those_of_the_text(core: EngineCore) -> None:
    core.add(request(0, search_of(noise(20))))
    while (plan := core.schedule()) is not None:
        outputs = core.execute(plan)
        core.finish(plan, outputs)
    [output] = outputs
    found = [token.logprobs.logprobs[0] for token in output.tokens if token.logprobs is not None]
    tokens = [token.token_id for token in output.tokens]
    core.take_result()
    forced = attrs.evolve(GREEDY, max_tokens=1, prompt_logprobs=0)
    core.add(attrs.evolve(request(1, noise(20), forced), prompt_token_ids=[*PROMPT, *tokens]))
    plan = core.schedule()
    assert plan is not None
    outputs = core.execute(plan)
    core.finish(plan, outputs)
    told = [row.logprobs[0] for row in outputs[0].prompt_logprobs]
    assert found == pytest.approx(told[-len(tokens) :], abs=1e-4)


def test_a_model_gone_wrong_is_the_searchs_own_failure(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = core._runner
    compute = runner._executor.logits

    def broken(rows: Any) -> Any:
        logits = compute(rows)
        if len(rows) > 2:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(runner._executor, "logits", broken)
    core.add(request(0, search_of(noise(20), 3)))
    core.add(request(1, noise(21)))
    found = run(core)
    assert {found[0][1], found[1][1]} <= {FinishReason.ERROR, FinishReason.STOP, FinishReason.LENGTH}
    assert found[0] == ([], FinishReason.ERROR)
