"""What comes of some speech."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

__all__ = ["SpeechSegment", "SpeechWord", "Transcription", "TranscriptionUpdate"]


@attrs.frozen(kw_only=True)
class SpeechWord:
    """A word and when it is said. Times are in seconds from the audio's beginning."""

    word: str
    """Without space around it; punctuation belongs to the word that it stands at."""
    start: float
    end: float


@attrs.frozen(kw_only=True)
class SpeechSegment:
    """Some words, mostly a sentence or a part of one; times as of `SpeechWord`."""

    id: int
    """Counts up from 0."""
    seek: int
    """Where its window begins, in hundredths of a second."""
    start: float
    end: float
    text: str
    """With the space that it begins with, so that segments can be joined."""
    tokens: Sequence[int]
    """With its timestamps' tokens."""
    temperature: float
    avg_logprob: float
    """Mean logprob of its window's tokens, by the rules that hold for them."""
    compression_ratio: float
    """Bytes of its window's text, over what zlib makes of them."""
    no_speech_prob: float
    """How likely its window has no speech in it."""
    words: Sequence[SpeechWord] = ()
    """Where they were asked for."""


@attrs.frozen(kw_only=True)
class TranscriptionUpdate:
    """What is new of a transcription."""

    text: str
    """Continues what came before."""
    segments: Sequence[SpeechSegment] = ()
    """Those of windows that have ended."""


@attrs.frozen(kw_only=True)
class Transcription:
    """The whole result."""

    request_id: str
    text: str
    language: str
    """A code: what is spoken, as was said or heard."""
    duration: float
    """Seconds of audio."""
    segments: Sequence[SpeechSegment]
    num_prompt_tokens: int
    """Of all windows, in the last attempt at each."""
    num_generation_tokens: int

    @property
    def words(self) -> Sequence[SpeechWord]:
        return [word for segment in self.segments for word in segment.words]
