"""Whisper's executor: against transformers, alone and in company; and what it remembers of audio."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from helpers_native import TIERS
from helpers_whisper import features, noise, tiny_whisper
from helpers_worker import engine_config, scheduled_sequence
from trioserve.core.engine import EngineCore
from trioserve.core.request import CoreRequest, MultimodalKey
from trioserve.errors import InvalidConfigError, InvalidRequestError, ModelNotSupportedError
from trioserve.models.config_whisper import whisper_config
from trioserve.sampling_params import SamplingParams
from trioserve.worker.heard_audio import Seats
from trioserve.worker.model_runner import ModelRunner
from trioserve.worker.whisper_executor import WhisperExecutor
from trioserve_kernels.native import load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trioserve.audio_input import AudioInput
    from trioserve.config import ResolvedModel
    from trioserve.worker.batch import ScheduledSequence

pytestmark = pytest.mark.usefixtures("same_number_of_threads")

BLOCKS_PER_TEXT = 16
TEXT = [3, 60, 7, 99, 12, 31, 8, 77, 5]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ResolvedModel]:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(params=["torch", *TIERS])
def executor(request: pytest.FixtureRequest, models: tuple[Any, ResolvedModel]) -> Iterator[WhisperExecutor]:
    """By torch, and by the kernels of each tier."""
    library = "a test" if request.param == "torch" else load(request.param)
    with closing(WhisperExecutor(models[1], engine_config(threads=2), library)) as executor:
        executor.allocate_kv_cache(4 * BLOCKS_PER_TEXT)
        yield executor


def sequence(audio: AudioInput, text: list[int], place: int, start: int = 0) -> ScheduledSequence:
    blocks = list(range(place * BLOCKS_PER_TEXT, (place + 1) * BLOCKS_PER_TEXT))
    return scheduled_sequence(
        request_id=place,
        start=start,
        token_ids=text,
        prompt_token_ids=text,
        block_tables=[blocks],
        audio=audio,
    )


def expected(theirs: Any, audio: AudioInput, text: list[int]) -> np.ndarray:
    with torch.inference_mode():
        found = theirs(features(audio), decoder_input_ids=torch.tensor([text])).logits[0]
    logits: np.ndarray = found.numpy()
    return logits


def all_logits(executor: WhisperExecutor, sequences: list[ScheduledSequence]) -> list[np.ndarray]:
    first_rows = executor.forward(sequences, {})
    return [
        executor.logits(range(first, first + len(one.token_ids))).copy()
        for first, one in zip(first_rows, sequences, strict=True)
    ]


def test_logits_are_those_of_transformers(
    models: tuple[Any, ResolvedModel], executor: WhisperExecutor
) -> None:
    audio = noise(0, 7.3)
    (found,) = all_logits(executor, [sequence(audio, TEXT, 0)])
    np.testing.assert_allclose(found, expected(models[0], audio, TEXT), atol=1e-4, rtol=1e-4)


def test_in_company_and_in_pieces_it_hears_and_writes_the_same(
    models: tuple[Any, ResolvedModel], executor: WhisperExecutor
) -> None:
    texts = [TEXT, TEXT[:4], [3, 1, 4, 1, 5, 9, 2, 6], TEXT]
    audios = [noise(1), noise(2, 30.0), noise(1), noise(3, 0.01)]
    begun = [
        sequence(audio, text[:2], place)
        for place, (audio, text) in enumerate(zip(audios, texts, strict=False))
    ]
    first = all_logits(executor, begun)
    others = [
        sequence(a, text[2:], place, 2) for place, (a, text) in enumerate(zip(audios, texts, strict=False))
    ]
    second = all_logits(executor, others)
    for audio, text, parts in zip(audios, texts, zip(first, second, strict=True), strict=True):
        np.testing.assert_allclose(
            np.concatenate(parts), expected(models[0], audio, text), atol=1e-4, rtol=1e-4
        )


def test_equal_audio_is_encoded_once(executor: WhisperExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = executor._encode
    monkeypatch.setattr(executor, "_encode", lambda a, *rest: (encoded.append(a), encode(a, *rest)))
    a, b = noise(4), noise(5)
    executor.forward([sequence(a, TEXT, 0), sequence(b, TEXT, 1), sequence(a, TEXT[:3], 2)], {})
    executor.forward([sequence(b, [4], 1, len(TEXT))], {})
    executor.forward([sequence(a, TEXT, 0)], {})
    assert encoded == [a, b]


def test_weights_and_cache_can_be_freed_and_come_back(executor: WhisperExecutor) -> None:
    audio = noise(7)
    (before,) = all_logits(executor, [sequence(audio, TEXT, 0)])
    executor.free_kv_cache()
    executor.free_weights()
    executor.load_weights()
    executor.allocate_kv_cache(2 * BLOCKS_PER_TEXT)
    (after,) = all_logits(executor, [sequence(audio, TEXT, 0)])
    np.testing.assert_array_equal(before, after)


def test_seats_are_kept_while_they_are_wanted_and_the_longest_unused_goes_first() -> None:
    seats = Seats(3)
    taken = {digest: seats.take(digest, {"a", "b", "c"}) for digest in "abc"}
    assert sorted(taken.values()) == [0, 1, 2]
    assert seats.find("a") == taken["a"]
    assert seats.take("d", {"b", "d"}) == taken["c"]
    assert seats.take("e", {"a", "d", "e"}) == taken["b"]
    assert [seats.find(digest) for digest in "bc"] == [None, None]
    assert len(seats) == 3


def test_memory_that_was_used_is_used_again_before_more_is_taken() -> None:
    seats = Seats(1000)
    for index in range(100):
        seats.take(str(index), {str(index)})
    assert len(seats) == 16


def run(model: ResolvedModel, audios: list[AudioInput], **args: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of each, through scheduler, cache, executor and sampler, all given at once."""
    config = engine_config(**args)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0, extra_args={"timestamps": True})
    told: list[tuple[list[int], list[float]]] = [([], []) for _ in audios]
    runner = ModelRunner(model, config)
    num_blocks = 3 * BLOCKS_PER_TEXT
    runner.allocate_kv_cache(num_blocks)
    core = EngineCore.from_config(
        runner, config, model, num_blocks=num_blocks, max_num_seqs=runner.max_num_seqs(num_blocks)
    )
    for number, audio in enumerate(audios):
        key = MultimodalKey(position=0, length=2, digest=audio.digest)
        core.add(
            CoreRequest(
                request_id=number,
                prompt_token_ids=[3, 4],
                params=params,
                seed=0,
                audio=audio,
                multimodal_keys=[key],
            )
        )
    while (plan := core.schedule()) is not None:
        assert len(plan.requests) <= 3
        outputs = core.execute(plan)
        for one, output in zip(plan.batch.sequences, outputs, strict=True):
            for token in output.tokens:
                assert token.logprobs is not None
                told[one.request_id][0].append(token.token_id)
                told[one.request_id][1].extend(token.logprobs.logprobs)
        core.finish(plan, outputs)
    runner.close()
    return told


def test_many_audios_share_few_seats(models: tuple[Any, ResolvedModel]) -> None:
    _, model = models
    audios = [noise(seed) for seed in (10, 11, 12, 13, 10, 14)]
    alone = [run(model, [audio])[0] for audio in audios]
    together = run(model, audios, max_num_seqs=16)
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    for (_, found), (_, own) in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-4)
    assert len({logprobs[0] for _, logprobs in alone}) == 5
    assert all(tokens[0] >= 51 for tokens, _ in alone)  # a timestamp comes first


def test_what_a_speech_model_cannot_be_served_with(models: tuple[Any, ResolvedModel], tmp_path: Path) -> None:
    _, model = models
    with pytest.raises(InvalidConfigError, match="enable_lora"):
        ModelRunner(model, engine_config(enable_lora=True))
    with pytest.raises(InvalidConfigError, match="kv_cache_dtype"):
        ModelRunner(model, engine_config(kv_cache_dtype="int8"))
    runner = ModelRunner(model, engine_config())
    with pytest.raises(InvalidRequestError, match="timestamps"):
        runner.check_params(SamplingParams(extra_args={"timestamps": "word"}))
    runner.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d_model": 0}, "d_model must be above 0"),
        ({"d_model": 30, "encoder_attention_heads": 4}, "multiple of the number of heads"),
        ({"activation_function": "relu"}, "activation_function must be gelu"),
        ({"max_source_positions": 100}, "must be 1500, got 100"),
    ],
)
def test_what_config_json_may_not_ask_for(changes: dict[str, Any], reason: str) -> None:
    from helpers_whisper import TINY

    with pytest.raises(ModelNotSupportedError, match=reason):
        whisper_config(TINY | changes)
