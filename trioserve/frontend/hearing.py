"""How a window of speech becomes text: what the engine is asked, one question after the other.

Nothing here waits or knows the engine. A hearing is a generator: it yields questions, is sent the answers,
and returns what was heard. So it reads as what it is (ask; if that is not good enough, ask again, hotter)
while whoever drives it may have many under way in one task.

What is done is what OpenAI's Whisper does, with one difference: text does not depend on that of the window
before, so windows are heard side by side. (There, each is told the text before it; it mostly helps, but
errors go on, too.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import attrs

from trioserve.audio_input import SpeechSearch
from trioserve.frontend.speech_tokens import SpeechTokens
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.frontend.transcription_params import TranscriptionParams
from trioserve.outputs import TokenLogprobs
from trioserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from typing import TypeAlias


__all__ = ["Answer", "Heard", "Hearing", "Listener", "Question"]

_MAX_PROMPT_TEXT = 4096
"""Characters at the end of a prompt; all that its tokens can hold, and more."""


@attrs.frozen(kw_only=True)
class Question:
    """What the engine is to write about a window."""

    token_ids: Sequence[int]
    """How its answer begins: of the decoder's prompt."""
    params: SamplingParams
    is_text: bool = False
    """The answer is what is said, or would be."""
    search: SpeechSearch | None = None
    """Of a text that is sought and not drawn."""


@attrs.frozen(kw_only=True)
class Answer:
    token_ids: Sequence[int]
    """With the end token, if it came to that."""
    logprobs: Sequence[TokenLogprobs]
    """Per token."""


@attrs.frozen(kw_only=True)
class Heard:
    """The text of a window."""

    token_ids: Sequence[int]
    """Without the end token."""
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None
    """None where nobody had to know."""

    def without_text(self) -> Heard:
        return attrs.evolve(self, token_ids=(), text="")


Hearing: TypeAlias = "Generator[Question, Answer, Heard]"


@attrs.frozen(kw_only=True, eq=False)
class Listener:
    """Asks about the windows of one transcription."""

    tokens: SpeechTokens
    tokenizer: Tokenizer
    params: TranscriptionParams
    context_length: int
    """Tokens of prompt and text."""
    language: str | None = None
    """A code that the model knows; None for models of English alone, and until it is found."""

    # The language

    def find_language(self) -> Generator[Question, Answer, str]:
        """Which of the model's languages is spoken."""
        codes = {token: code for code, token in self.tokens.languages.items()}
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, allowed_token_ids=tuple(codes))
        answer = yield Question(token_ids=[self.tokens.sot], params=params)
        return codes[answer.token_ids[0]]

    # The text

    def hear(self) -> Hearing:
        """The text of a window: the first that is good enough, or the likeliest, if possible of those that
        are not repetitive. (OpenAI's Whisper takes the last then, which is the hottest.)"""
        no_speech: float | None = None
        if self.params.timestamps != "none":  # who wants to know when also wants to know whether
            no_speech = yield from self._hear_silence()
        prompt, tried = self._prompt(), list[Heard]()
        for temperature in self.params.temperature:
            heard = self._read((yield self._question(prompt, temperature)), temperature)
            if self._is_doubtful(heard) and no_speech is None and self.params.no_speech_threshold is not None:
                no_speech = yield from self._hear_silence()
            heard = attrs.evolve(heard, no_speech_prob=no_speech)
            if self._is_silence(heard):
                return heard.without_text()
            if not (self._is_doubtful(heard) or self._is_repetitive(heard)):
                return heard
            tried.append(heard)
        plain = [heard for heard in tried if not self._is_repetitive(heard)]
        return max(plain or tried, key=lambda heard: heard.avg_logprob)

    def _hear_silence(self) -> Generator[Question, Answer, float]:
        """How likely nothing is said."""
        token = self.tokens.no_speech
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprob_token_ids=(token,))
        answer = yield Question(token_ids=[self.tokens.sot], params=params)
        return math.exp(answer.logprobs[0][token].logprob)

    def _question(self, prompt: Sequence[int], temperature: float) -> Question:
        given = self.params
        room = self.context_length - len(prompt)
        params = SamplingParams(
            temperature=temperature,
            max_tokens=room if given.max_tokens is None else min(room, given.max_tokens),
            logprobs=0,
            detokenize=False,
            extra_args={"timestamps": given.timestamps != "none"},
            **{name: getattr(given, name) for name in _SAMPLING},
        )
        search = self._search() if temperature == 0 else None
        return Question(token_ids=prompt, params=params, is_text=True, search=search)

    def _search(self) -> SpeechSearch | None:
        given = self.params
        if not given.searches:
            return None
        return SpeechSearch(beam_width=given.beam_width, length_penalty=given.length_penalty)

    def _prompt(self) -> list[int]:
        ids = [*self._text_before(), *self._start()]
        return [*ids, self.tokens.no_timestamps] if self.params.timestamps == "none" else ids

    def _start(self) -> list[int]:
        tokens, task = self.tokens, self.params.task
        if not tokens.is_multilingual:
            return [tokens.sot]
        assert self.language is not None
        task_token = tokens.translate if task == "translate" else tokens.transcribe
        return [tokens.sot, tokens.languages[self.language], task_token]

    def before_text(self) -> list[int]:
        """A prompt for text without timestamps."""
        return [*self._start(), self.tokens.no_timestamps]

    def _text_before(self) -> list[int]:
        """Half of the context at most."""
        text = [self._encode(self.params.hotwords), self._encode(self.params.prompt)]
        ids = [token for part in text for token in part]
        return [self.tokens.prev, *ids[-(self.context_length // 2 - 1) :]] if ids else []

    def _encode(self, text: str) -> list[int]:
        """Without what a text may have of special tokens."""
        text = text[-_MAX_PROMPT_TEXT:].strip()
        if not text:
            return []
        ids = self.tokenizer.encode(f" {text}", add_special_tokens=False)
        return [token for token in ids if token < self.tokens.eot]

    def _read(self, answer: Answer, temperature: float) -> Heard:
        eot = self.tokens.eot
        spoken = [token for token in answer.token_ids if token < eot]
        text = self.tokenizer.decode(spoken)
        return Heard(
            token_ids=[token for token in answer.token_ids if token != eot],
            text=text,
            temperature=temperature,
            avg_logprob=_mean_logprob(answer),
            compression_ratio=_compression_ratio(text),
            no_speech_prob=None,
        )

    # Whether it is good enough

    def _is_doubtful(self, heard: Heard) -> bool:
        limit = self.params.logprob_threshold
        return limit is not None and heard.avg_logprob < limit

    def _is_repetitive(self, heard: Heard) -> bool:
        limit = self.params.compression_ratio_threshold
        return limit is not None and heard.compression_ratio > limit

    def _is_silence(self, heard: Heard) -> bool:
        limit = self.params.no_speech_threshold
        if limit is None or heard.no_speech_prob is None or heard.no_speech_prob <= limit:
            return False
        return self.params.logprob_threshold is None or self._is_doubtful(heard)


_SAMPLING = ("seed", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Fields of `TranscriptionParams` that mean what they do in `SamplingParams`."""


def _mean_logprob(answer: Answer) -> float:
    """Of the text, its timestamps and its end."""
    drawn = zip(answer.token_ids, answer.logprobs, strict=True)
    return sum(entries[token].logprob for token, entries in drawn) / max(len(answer.token_ids), 1)


def _compression_ratio(text: str) -> float:
    encoded = text.encode()
    return len(encoded) / len(zlib.compress(encoded))
