"""What is to be made of some speech."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import attrs

from trioserve.audio_input import SpeechSearch
from trioserve.sampling_params import SamplingParams
from trioserve.validators import integer, number, one_of, optional, plain, reject

__all__ = ["FALLBACK_TEMPERATURES", "SpeechTask", "TimestampKind", "TranscriptionParams"]

SpeechTask = Literal["transcribe", "translate"]
"""translate: into English."""

TimestampKind = Literal["none", "segment", "word"]

FALLBACK_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Tried one after the other, until the text is good enough: those of OpenAI's Whisper."""

_PARAMS = attrs.fields_dict(SamplingParams)
_SEARCH = attrs.fields_dict(SpeechSearch)
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_MAX_TEMPERATURES = 8


def _to_temperatures(value: Any) -> Any:
    """0 alone means OpenAI's list; any other number means itself."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(map(plain, value))
    given = plain(value)
    return FALLBACK_TEMPERATURES if given == 0 and not isinstance(given, bool) else (given,)


def _temperatures(_: object, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    allowed = f"a number from 0 to 2, or 1 to {_MAX_TEMPERATURES} of them"
    if not 1 <= len(value) <= _MAX_TEMPERATURES:
        raise reject(attribute, list(value), allowed)
    for temperature in value:
        number(allowed, least=0, most=2)(None, attribute, temperature)


def _text(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise reject(attribute, value, "a string")


def _sampling(name: str) -> Any:
    """As the field of the same name of `SamplingParams`."""
    return _like(_PARAMS[name])


def _like(like: attrs.Attribute[Any]) -> Any:
    return attrs.field(default=like.default, converter=like.converter, validator=like.validator)


def _threshold(default: float, allowed: str) -> Any:
    return attrs.field(default=default, converter=plain, validator=optional(number(allowed)))


@attrs.frozen(kw_only=True)
class TranscriptionParams:
    """Validated at construction: a wrong value raises `InvalidRequestError`, which names the field."""

    task: SpeechTask = attrs.field(default="transcribe", validator=one_of(("transcribe", "translate")))
    language: str | None = attrs.field(default=None, validator=optional(_text))
    """What is spoken, as an ISO 639 code ("en") or an English name; None: what the first 30 seconds sound
    like."""
    timestamps: TimestampKind = attrs.field(default="segment", validator=one_of(("none", "segment", "word")))
    """none: a window (30 seconds or less) is one segment."""
    prompt: str = attrs.field(default="", validator=_text)
    """What might have been said before, for style and spelling; its end counts, some 220 tokens."""
    hotwords: str = attrs.field(default="", validator=_text)
    """Words that are likely to come; they take some of the prompt's room."""
    temperature: tuple[float, ...] = attrs.field(
        default=FALLBACK_TEMPERATURES, converter=_to_temperatures, validator=_temperatures
    )
    """A number, or several, each for a window whose text was not good enough with the one before. 0 alone
    stands for `FALLBACK_TEMPERATURES`."""
    beam_width: int = _like(_SEARCH["beam_width"])
    """Texts that are followed side by side at temperature 0, of which the likeliest is taken; 1: none but the
    one that is the likeliest token by token. A penalty makes it 1."""
    length_penalty: float = _like(_SEARCH["length_penalty"])
    """Of these, which is the likeliest: logprobs' sum / length ** length_penalty."""
    compression_ratio_threshold: float | None = _threshold(2.4, "a number, or null")
    """Text that zlib makes smaller than that is not good enough: it says the same over and over."""
    logprob_threshold: float | None = _threshold(-1.0, "a number, or null")
    """Nor is text whose tokens have a lower mean logprob."""
    no_speech_threshold: float | None = _threshold(0.6, "a number from 0 to 1, or null")
    """Such text counts as none where silence is more likely than that."""
    max_tokens: int | None = attrs.field(
        default=None, converter=plain, validator=optional(integer("an integer >= 1, or null", least=1))
    )
    """Of each window; None: as many as the context holds."""
    seed: int | None = _sampling("seed")
    top_p: float = _sampling("top_p")
    top_k: int = _sampling("top_k")
    min_p: float = _sampling("min_p")
    frequency_penalty: float = _sampling("frequency_penalty")
    presence_penalty: float = _sampling("presence_penalty")
    repetition_penalty: float = _sampling("repetition_penalty")

    @property
    def searches(self) -> bool:
        """Text at temperature 0 is found by beam search."""
        return self.beam_width > 1 and all(
            getattr(self, name) == _PARAMS[name].default for name in _PENALTIES
        )

    @property
    def is_tentative(self) -> bool:
        """Text may be thrown away, so it is not known before its window ends."""
        return len(self.temperature) > 1 or (self.searches and self.temperature[0] == 0)
