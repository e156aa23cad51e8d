"""POST /v1/audio/transcriptions and /v1/audio/translations: the form's fields, the answers, the events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
from msgspec import UNSET, UnsetType

from trioserve.frontend.transcription_params import TranscriptionParams
from trioserve.sampling_params import SamplingParams
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.refusals import Refusal

__all__ = [
    "TRANSCRIPTION_READER",
    "TRANSLATION_READER",
    "DurationUsage",
    "SpokenText",
    "SpokenTextDelta",
    "SpokenTextDone",
    "SpokenWord",
    "TokenUsage",
    "TranscriptionRequest",
    "VerboseSegment",
    "VerboseTranscription",
]

SpeechFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]

# The request


@attrs.frozen(kw_only=True)
class TranscriptionRequest:
    """The fields beside `file`. None always means "not given"."""

    model: str | None = None
    language: str | None = None
    """An ISO 639 code, or an English name; without it, the language is found."""
    prompt: str | None = None
    """What might have been said before."""
    hotwords: str | None = None
    """Words that are likely to come."""
    keywords: list[str] | None = None
    """The same, one by one."""
    response_format: SpeechFormat | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    """What verbose_json is to have; by default, segments."""
    temperature: float | None = None
    """0, the default: windows whose text is not good enough are heard again with higher ones."""
    use_beam_search: bool | None = None
    """True by default, unless `stream`: texts are followed side by side at temperature 0."""
    beam_width: int | None = None
    """So many, 5 by default; 1: as without beam search."""
    length_penalty: float | None = None
    """The higher, the longer the text may be."""
    stream: bool | None = None
    seed: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = None
    """Of each window of 30 seconds."""
    priority: int | None = None
    request_id: str | None = None
    timeout: float | None = None

    @property
    def form(self) -> SpeechFormat:
        return self.response_format or "json"

    @property
    def granularities(self) -> frozenset[str]:
        return frozenset(self.timestamp_granularities or ("segment",))


_PARAMS = attrs.fields_dict(SamplingParams)
_TRANSCRIPTION = attrs.fields_dict(TranscriptionParams)

_RANGES = {
    "max_completion_tokens": _PARAMS["max_tokens"].evolve(name="max_completion_tokens"),
    "beam_width": _TRANSCRIPTION["beam_width"],
    "length_penalty": _TRANSCRIPTION["length_penalty"],
} | {
    name: _PARAMS[name]
    for name in (
        "temperature", "seed", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty",
    )
}  # fmt: skip

_REFUSALS = (
    Refusal("n", "1 or null", (1,)),
    Refusal("include", "null or empty", ([],)),
    Refusal("chunking_strategy", '"auto" or null', ("auto",)),
    *(
        Refusal(field, "null or empty", ([], ""))
        for field in (
            "languages",
            "known_speaker_names",
            "known_speaker_references",
            "to_language",
            "vllm_xargs",
        )
    ),
)


def _find_conflicts(request: TranscriptionRequest) -> list[Problem]:
    problems = []
    if request.stream and request.form not in {"json", "text"}:
        problems.append(
            Problem(
                "response_format", f"response_format must be json or text with stream, got {request.form}."
            )
        )
    if request.use_beam_search is False and request.beam_width not in {None, 1}:
        sentence = f"beam_width must be 1 or null without use_beam_search, got {request.beam_width}."
        problems.append(Problem("beam_width", sentence))
    if request.timestamp_granularities and request.form != "verbose_json":
        problems.append(
            Problem(
                "timestamp_granularities",
                f"timestamp_granularities must be empty unless response_format is verbose_json, "
                f"got {', '.join(request.timestamp_granularities)} with {request.form}.",
            )
        )
    return problems


def _find_translation_conflicts(request: TranscriptionRequest) -> list[Problem]:
    problems = _find_conflicts(request)
    if "word" in request.granularities:
        sentence = (
            "timestamp_granularities must be segment for a translation: its words are not those spoken."
        )
        problems.append(Problem("timestamp_granularities", sentence))
    return problems


TRANSCRIPTION_READER = RequestReader(
    kind=TranscriptionRequest, ranges=_RANGES, refusals=_REFUSALS, conflicts=_find_conflicts
)
TRANSLATION_READER = RequestReader(
    kind=TranscriptionRequest, ranges=_RANGES, refusals=_REFUSALS, conflicts=_find_translation_conflicts
)

# The answers


@attrs.frozen(kw_only=True)
class DurationUsage:
    type: str = "duration"
    seconds: int
    """Of audio, rounded up."""


@attrs.frozen(kw_only=True)
class InputTokenDetails:
    text_tokens: int
    audio_tokens: int


@attrs.frozen(kw_only=True)
class TokenUsage:
    type: str = "tokens"
    input_tokens: int
    input_token_details: InputTokenDetails
    output_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, *, text: int, audio: int, output: int) -> TokenUsage:
        return cls(
            input_tokens=text + audio,
            input_token_details=InputTokenDetails(text_tokens=text, audio_tokens=audio),
            output_tokens=output,
            total_tokens=text + audio + output,
        )


@attrs.frozen(kw_only=True)
class SpokenText:
    """json. A translation has no usage."""

    text: str
    usage: DurationUsage | UnsetType = UNSET


@attrs.frozen(kw_only=True)
class SpokenWord:
    word: str
    start: float
    end: float


@attrs.frozen(kw_only=True)
class VerboseSegment:
    id: int
    seek: int
    """Where its window begins, in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@attrs.frozen(kw_only=True)
class VerboseTranscription:
    """verbose_json."""

    task: str
    language: str
    """Its English name; of a translation, english."""
    duration: float
    text: str
    segments: Sequence[VerboseSegment] | UnsetType = UNSET
    words: Sequence[SpokenWord] | UnsetType = UNSET
    usage: DurationUsage | UnsetType = UNSET


@attrs.frozen(kw_only=True)
class SpokenTextDelta:
    type: str = "transcript.text.delta"
    delta: str


@attrs.frozen(kw_only=True)
class SpokenTextDone:
    type: str = "transcript.text.done"
    text: str
    usage: TokenUsage
