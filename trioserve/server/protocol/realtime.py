"""What a client of `WS /v1/realtime` may say: vLLM's events and OpenAI's, which have most names in common."""

from __future__ import annotations

import binascii
from typing import Any, Literal, TypeAlias

import attrs
import msgspec

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.json_depth import check_json_depth
from trioserve.server.protocol.lists import shorten
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.validators import integer, number, reject

__all__ = [
    "AS_BEFORE",
    "AudioAppend",
    "AudioClear",
    "AudioCommit",
    "ClientEvent",
    "EventError",
    "SessionUpdate",
    "TranscriptionSession",
    "TurnDetection",
    "read_event",
]


class EventError(Exception):
    """An event is wrong. The session goes on."""

    def __init__(
        self, code: str, message: str, param: str | None = None, event_id: str | None = None
    ) -> None:
        """`event_id` is that of the client's event, if it had one."""
        super().__init__(message)
        self.code, self.message, self.param, self.event_id = code, message, param, event_id


# What a session may be told to be, in OpenAI's words


@attrs.frozen(kw_only=True)
class AudioFormat:
    type: Literal["audio/pcm"] = "audio/pcm"
    rate: int = attrs.field(
        default=24_000,
        validator=integer("an integer from 8000 to 48000, samples per second", least=8000, most=48_000),
    )


@attrs.frozen(kw_only=True)
class InputTranscription:
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    keywords: list[str] | None = None


def _null(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        raise reject(attribute, value, "null: it is not supported")


def _milliseconds(default: int, most: int) -> Any:
    allowed = f"an integer from 0 to {most}, milliseconds"
    return attrs.field(default=default, validator=integer(allowed, least=0, most=most))


@attrs.frozen(kw_only=True)
class TurnDetection:
    """The server ends what is said, where a pause is long enough."""

    type: Literal["server_vad"] = "server_vad"
    threshold: float = attrs.field(default=0.5, validator=number("a number from 0 to 1", least=0, most=1))
    prefix_padding_ms: int = _milliseconds(300, 2000)
    silence_duration_ms: int = _milliseconds(500, 10_000)


AS_BEFORE = TurnDetection()
"""This very object: nothing was said of it. (Null says that there is to be none.)"""


@attrs.frozen(kw_only=True)
class InputAudio:
    format: AudioFormat | None = None
    transcription: InputTranscription | None = None
    turn_detection: TurnDetection | None = AS_BEFORE
    noise_reduction: dict[str, Any] | None = attrs.field(default=None, validator=_null)


@attrs.frozen(kw_only=True)
class SessionAudio:
    input: InputAudio | None = None


def _empty(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value:
        raise reject(attribute, value, "empty, or null")


@attrs.frozen(kw_only=True)
class TranscriptionSession:
    type: Literal["transcription"]
    audio: SessionAudio | None = None
    include: list[str] | None = attrs.field(default=None, validator=_empty)


# The events


@attrs.frozen(kw_only=True)
class SessionUpdate:
    """vLLM's has a `model`, OpenAI's a `session`."""

    event_id: str | None = None
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    session: TranscriptionSession | None = None


@attrs.frozen(kw_only=True)
class AudioAppend:
    event_id: str | None = None
    audio: str = attrs.field(repr=False)

    def samples(self) -> bytes:
        """16-bit samples.

        Raises:
          EventError: it is no base64, has nothing in it, or half a sample.
        """
        try:
            data = binascii.a2b_base64(self.audio, strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise self._wrong(f"base64: {error}") from None
        if not data or len(data) % 2:
            raise self._wrong(f"16-bit samples, at least one, got {len(data)} bytes")
        return data

    def _wrong(self, allowed: str) -> EventError:
        return EventError("invalid_audio", f"audio must be {allowed}.", "audio", self.event_id)


@attrs.frozen(kw_only=True)
class AudioCommit:
    event_id: str | None = None
    final: bool = False


@attrs.frozen(kw_only=True)
class AudioClear:
    event_id: str | None = None


ClientEvent: TypeAlias = SessionUpdate | AudioAppend | AudioCommit | AudioClear


def _needs_model_or_session(event: SessionUpdate) -> list[Problem]:
    if event.model is None and event.session is None:
        return [Problem("model", "model must be given, or a session.")]
    return []


def _reader(kind: Any, conflicts: Any = lambda _: []) -> RequestReader[Any]:
    return RequestReader(kind=kind, ranges={}, refusals=(), conflicts=conflicts)


_READERS: dict[str, RequestReader[Any]] = {
    "session.update": _reader(SessionUpdate, _needs_model_or_session),
    "input_audio_buffer.append": _reader(AudioAppend),
    "input_audio_buffer.commit": _reader(AudioCommit),
    "input_audio_buffer.clear": _reader(AudioClear),
}


@attrs.frozen
class _Head:
    type: str
    event_id: str | None = None


_decode_head = msgspec.json.Decoder(_Head).decode


def read_event(text: str, max_depth: int) -> ClientEvent:
    """What a message of the client says. Of megabytes it takes tens of milliseconds.

    Raises:
      EventError: it is no JSON, no event, or none that is known here.
    """
    data = text.encode()
    head = _read_head(data, max_depth)
    reader = _READERS.get(head.type)
    if reader is None:
        message = f"type must be one of {', '.join(_READERS)}, got {shorten(head.type)}."
        raise EventError("unknown_event", message, "type", head.event_id)
    try:
        event: ClientEvent = reader.read(data)
    except InvalidRequestError as error:
        raise EventError("invalid_event", str(error), error.parameter, head.event_id) from None
    return event


def _read_head(data: bytes, max_depth: int) -> _Head:
    try:
        check_json_depth(data, max_depth)
        return _decode_head(data)
    except msgspec.ValidationError as error:
        raise EventError("invalid_event", f"An event is a JSON object with a type: {error}.") from None
    except (msgspec.DecodeError, InvalidRequestError, RecursionError) as error:
        raise EventError("invalid_json", f"The event is not valid JSON: {error}.") from None
