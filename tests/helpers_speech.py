"""A speech model of bytes, over a fake engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import trio
from tokenizers import AddedToken

from byte_tokenizer import byte_backend, byte_model
from fake_engine import FakeEngine, open_fake_llm
from trioserve.audio.speech import Speech
from trioserve.frontend.speech_tokens import SpeechTokens
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.link.messages import Add
from trioserve.model_sources import SilentProgress
from trioserve.model_sources.cache import cache_root, publish_directory
from trioserve.model_sources.wheels import Requirement, open_packages
from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from trioserve.config import ResolvedModel

_NAMES = (
    "endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startoflm", "startofprev",
    "nospeech", "notimestamps",
)  # fmt: skip


def _speech_backend() -> Any:
    backend = byte_backend()
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in _NAMES])
    backend.add_tokens([AddedToken(f"<|{i / 50:.2f}|>", special=False) for i in range(1501)])
    return backend


TOKENS = SpeechTokens.of(Tokenizer(_speech_backend(), {}, None))


def speech_model(directory: Path) -> ResolvedModel:
    """Its tokenizer is saved in `directory`."""
    directory.mkdir(exist_ok=True)
    backend = _speech_backend()
    backend.save(str(directory / "tokenizer.json"))
    return attrs.evolve(
        byte_model(str(directory), context_length=448),
        vocab_size=backend.get_vocab_size(),
        eos_token_ids=(TOKENS.eot,),
        tasks=("transcription",),
    )


@asynccontextmanager
async def open_hearing_llm(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **engine_args: Any
) -> AsyncIterator[FakeEngine]:
    model = speech_model(directory / "speech")
    async with open_fake_llm(directory, monkeypatch, model=model, **engine_args) as fake:
        yield fake


def speech(seconds: float) -> Speech:
    """Noise, whose samples tell where they are from: it grows louder."""
    count = int(seconds * 16_000)
    noise = np.random.default_rng(0).uniform(-1, 1, count)
    return Speech.from_samples(noise * np.linspace(0.1, 1, count))


BECKETT = "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."
"""As Whisper tiny writes it with five beams, here and in transformers; and Beckett."""

BECKETT_GREEDY = "Ever tried, ever failed. No matter, try again. Fail again. Fail better."


def beckett() -> bytes:
    """A clip in which that is said (16 kHz, ten seconds), out of a package that is fetched once."""
    kept = cache_root() / "test-audio" / "beckett.wav"
    if not kept.exists():
        package = Requirement("useful-moonshine-onnx", "20251121")
        with (
            open_packages([package], SilentProgress()) as members,
            members.open(package, "moonshine_onnx/assets/beckett.wav") as file,
            publish_directory(kept.parent) as folder,
        ):
            (folder / kept.name).write_bytes(file.read())
    return kept.read_bytes()


async def eventually(condition: Callable[[], object]) -> None:
    """Threads may have to finish before it holds."""
    with trio.fail_after(10):
        while not condition():
            await trio.testing.wait_all_tasks_blocked(0.002)


def timestamp(seconds: float) -> int:
    return TOKENS.timestamp_begin + round(seconds * 50)


def is_language_question(add: Add) -> bool:
    return add.params.allowed_token_ids is not None


def is_silence_question(add: Add) -> bool:
    return bool(add.params.logprob_token_ids)


def is_text_question(add: Add) -> bool:
    return not (is_language_question(add) or is_silence_question(add))


def tokens_of(*parts: str | float | int) -> list[int]:
    """Texts as bytes, floats as timestamps, integers as they are."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += part.encode()
        else:
            ids.append(timestamp(part) if isinstance(part, float) else part)
    return ids


def said(*parts: str | float | int, logprob: float = -0.25) -> list[SampledToken]:
    """Tokens that were drawn, and the end."""
    ids = [*tokens_of(*parts), TOKENS.eot]
    return [SampledToken(token, LogprobRow([token], [logprob], [1])) for token in ids]


@attrs.define
class FakeHearing:
    """Answers a transcription's questions as a test says, in a task of the test's."""

    fake: FakeEngine
    text: Callable[[Add, int], Sequence[SampledToken]]
    """(question, how many of text came before) -> the answer."""
    language: str = "en"
    no_speech: float = 0.01
    questions: list[Add] = attrs.field(factory=list)
    """All, in the order of their coming."""

    async def answer(self) -> None:
        while True:
            await trio.testing.wait_all_tasks_blocked()
            for add in self.fake.client.added[len(self.questions) :]:
                self.questions.append(add)
                self._answer(add)
            await trio.lowlevel.checkpoint()

    @property
    def text_questions(self) -> list[Add]:
        return [add for add in self.questions if is_text_question(add)]

    def _answer(self, add: Add) -> None:
        if is_language_question(add):
            self.fake.client.emit(add, [TOKENS.languages[self.language]], FinishReason.LENGTH)
        elif is_silence_question(add):
            row = LogprobRow([1, TOKENS.no_speech], [-0.1, math.log(self.no_speech)], [1, 2])
            self.fake.client.emit(add, [SampledToken(1, row)], FinishReason.LENGTH)
        else:
            answer = self.text(add, len(self.text_questions) - 1)
            ended = answer[-1].token_id == TOKENS.eot
            self.fake.client.emit(add, answer, FinishReason.STOP if ended else FinishReason.LENGTH)
