"""Audio as a prompt: what is taken, what is refused, and what the engine core is sent."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

import pytest
import trio
from tokenizers import AddedToken

from byte_tokenizer import byte_backend, byte_tokenizer
from fake_engine import open_fake_llm
from helpers_speech import open_hearing_llm
from trioserve import AudioPrompt, InvalidRequestError, SamplingParams
from trioserve.beam_search_params import BeamSearchParams
from trioserve.errors import ModelNotSupportedError
from trioserve.frontend.speech_tokens import SpeechTokens
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from pathlib import Path


SAMPLES = array("f", [0.5] * 1600).tobytes()


async def test_the_core_gets_the_audio_and_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = AudioPrompt(SAMPLES, [1, 2])
    async with (
        open_hearing_llm(tmp_path, monkeypatch) as fake,
        fake.llm.stream(prompt, SamplingParams(n=2)) as stream,
    ):
        await trio.testing.wait_all_tasks_blocked()
        adds = fake.client.added
        for add in adds:
            fake.client.emit(add, "ab", FinishReason.LENGTH)
        outputs = [output async for output in stream]
    assert [add.audio.samples for add in adds if add.audio] == [SAMPLES] * 2
    assert {add.audio.digest for add in adds if add.audio} == {hashlib.sha256(SAMPLES).hexdigest()}
    assert [completion.text for completion in outputs[-1].outputs] == ["ab", "ab"]
    assert outputs[-1].prompt_token_ids == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ("text", SamplingParams(), "takes audio"),
        ([1, 2], SamplingParams(), "takes audio"),
        (AudioPrompt(SAMPLES, []), SamplingParams(), "empty"),
        (AudioPrompt(SAMPLES, [5000]), SamplingParams(), "below the vocabulary's size of 1769"),
        (AudioPrompt(SAMPLES, [1] * 448), SamplingParams(), "448"),
        (AudioPrompt(SAMPLES, [1]), SamplingParams(n=5), "n must be at most 4 with audio, got 5"),
    ],
)
async def test_what_a_speech_model_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompt: str | list[int] | AudioPrompt,
    params: SamplingParams,
    reason: str,
) -> None:
    async with open_hearing_llm(tmp_path, monkeypatch) as fake:
        with pytest.raises(InvalidRequestError, match=reason):
            await fake.llm.complete(prompt, params)
    assert not fake.client.added


async def test_a_model_of_text_refuses_audio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fake_llm(tmp_path, monkeypatch) as fake:
        with pytest.raises(InvalidRequestError, match="the prompt is audio"):
            await fake.llm.complete(AudioPrompt(SAMPLES, [1]))


async def test_there_is_no_beam_search_over_audio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_hearing_llm(tmp_path, monkeypatch) as fake:
        with pytest.raises(InvalidRequestError, match="the prompt is audio"):
            await fake.llm.beam_search(
                AudioPrompt(SAMPLES, [1]), BeamSearchParams(beam_width=2, max_tokens=4)
            )


@pytest.mark.parametrize("samples", [b"", bytes(7), bytes(4 * 480_001), "text", [0.5]])
def test_audio_is_at_most_30_seconds_of_float32(samples: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"samples must be .*float32 .* 30 seconds"):
        AudioPrompt(samples, [1])
    assert AudioPrompt(bytes(4 * 480_000), [1])


def test_speech_tokens_by_their_names() -> None:
    backend = byte_backend()
    names = ["endoftext", "startoftranscript", "en", "haw", "translate", "transcribe", "startoflm"]
    names += ["startofprev", "nocaptions", "notimestamps"]
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    tokens = SpeechTokens.of(Tokenizer(backend, {}, None))
    assert (tokens.eot, tokens.sot, tokens.translate, tokens.transcribe) == (257, 258, 261, 262)
    assert (tokens.prev, tokens.no_speech, tokens.no_timestamps) == (264, 265, 266)
    assert tokens.languages == {"en": 259, "haw": 260}
    assert tokens.is_multilingual
    assert [tokens.seconds(token) for token in (97, 266, 267, 317)] == [None, None, 0.0, 1.0]


def test_another_tokenizer_has_no_speech_tokens() -> None:
    with pytest.raises(ModelNotSupportedError, match=r"no token <\|endoftext\|>"):
        SpeechTokens.of(byte_tokenizer())
