"""A real Whisper, in an engine core of its own, about a real clip."""

from __future__ import annotations

import wave
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from helpers_model_sources import packaged_model
from trioserve import AsyncLLM, AudioPrompt, EngineArgs, SamplingParams
from trioserve.frontend.speech_tokens import SpeechTokens
from trioserve.model_sources import SilentProgress
from trioserve.model_sources.wheels import Requirement, open_packages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioserve.outputs import CompletionOutput

CLIP = "moonshine_onnx/assets/beckett.wav"
SAID = " Ever tried, ever failed. No matter, try again. Fail again. Fail better."


@cache
def clip() -> bytes:
    """A man who reads Beckett, 10 seconds: float32 samples."""
    requirement = Requirement("useful-moonshine-onnx", "20251121")
    with (
        open_packages([requirement], SilentProgress()) as members,
        members.open(requirement, CLIP) as file,
        wave.open(file) as audio,
    ):
        samples = np.frombuffer(audio.readframes(audio.getnframes()), np.int16)
    return (samples.astype(np.float32) / 32768).tobytes()


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    packaged_model("whisper-tiny.en")
    args = EngineArgs(model="whisper-tiny.en", threads=2, max_num_seqs=8)
    async with AsyncLLM.from_engine_args(args) as llm:
        yield llm


def params(*, timestamps: bool, max_tokens: int = 100) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, extra_args={"timestamps": timestamps})


async def complete(llm: AsyncLLM, samples: bytes, *, timestamps: bool) -> CompletionOutput:
    tokens = SpeechTokens.of(llm.tokenizer)
    prompt = [tokens.sot] if timestamps else [tokens.sot, tokens.no_timestamps]
    output = await llm.complete(AudioPrompt(samples, prompt), params(timestamps=timestamps))
    return output.outputs[0]


async def test_the_clip_word_for_word_with_and_without_times_beside_others(llm: AsyncLLM) -> None:
    tokens = SpeechTokens.of(llm.tokenizer)
    found: dict[str, CompletionOutput] = {}

    async def ask(name: str, samples: bytes, *, timestamps: bool) -> None:
        found[name] = await complete(llm, samples, timestamps=timestamps)

    samples = clip()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: ask("plain", samples, timestamps=False))
        nursery.start_soon(lambda: ask("timed", samples, timestamps=True))
        nursery.start_soon(lambda: ask("half", samples[: len(samples) // 2], timestamps=False))
    assert found["plain"].text == found["timed"].text == SAID
    assert found["half"].text.startswith(" Ever tried, ever failed.")
    times = [tokens.seconds(token) for token in found["timed"].token_ids]
    # As transformers gives them.
    assert [time for time in times if time is not None] == [0.0, 3.0, 3.0, 6.0, 6.0, 8.0, 8.0, 9.0]


async def test_who_leaves_does_not_disturb_the_next_one(llm: AsyncLLM) -> None:
    tokens = SpeechTokens.of(llm.tokenizer)
    prompt = AudioPrompt(clip(), [tokens.sot, tokens.no_timestamps])
    endless = SamplingParams(temperature=1, seed=1, max_tokens=400, ignore_eos=True)
    async with llm.stream(prompt, endless) as stream:
        await anext(aiter(stream))
    assert llm.num_open_requests == 0
    assert (await complete(llm, clip(), timestamps=False)).text == SAID


async def test_times_of_tokens_are_those_of_transformers(llm: AsyncLLM) -> None:
    tokens = SpeechTokens.of(llm.tokenizer)
    answer = await complete(llm, clip(), timestamps=True)
    text = [token for token in answer.token_ids if token != tokens.eot]
    found = await llm.align(AudioPrompt(clip(), [tokens.sot]), text)
    starts = [time for time, token in zip(found, text, strict=True) if token < tokens.eot]
    assert starts == sorted(starts)
    np.testing.assert_allclose(starts[:-1], EXPECTED, atol=0.1)


EXPECTED = [0.72, 1.22, 1.96, 2.22, 2.72, 3.42, 3.82, 4.1, 4.92, 5.2, 5.74, 6.66, 6.94, 7.42, 8.16, 8.48, 8.8]
"""Of `generate(return_timestamps=True, return_token_timestamps=True)`, but for the last full stop:
transformers puts it into the silence that fills the window."""
