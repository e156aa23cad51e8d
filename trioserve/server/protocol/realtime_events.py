"""What the server says in `WS /v1/realtime`: vLLM's events, and OpenAI's of a transcription session."""

from __future__ import annotations

from typing import Literal

import attrs

from trioserve.server.protocol.realtime import TranscriptionSession

__all__ = [
    "AudioCleared",
    "AudioCommitted",
    "DurationUsage",
    "ItemCompleted",
    "ItemDelta",
    "ItemFailed",
    "OpenAIError",
    "OpenAIErrorDetail",
    "SessionCreated",
    "SessionState",
    "SessionUpdated",
    "SpeechStarted",
    "SpeechStopped",
    "TokenUsage",
    "TranscriptionDelta",
    "TranscriptionDone",
    "VllmError",
]


# vLLM's


@attrs.frozen(kw_only=True)
class TranscriptionDelta:
    type: Literal["transcription.delta"] = "transcription.delta"
    delta: str


@attrs.frozen(kw_only=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@attrs.frozen(kw_only=True)
class TranscriptionDone:
    type: Literal["transcription.done"] = "transcription.done"
    text: str
    usage: TokenUsage


@attrs.frozen(kw_only=True)
class VllmError:
    type: Literal["error"] = "error"
    error: str
    code: str


# Both


@attrs.frozen(kw_only=True)
class SessionState(TranscriptionSession):
    """What a session is at present."""

    id: str
    object: Literal["realtime.transcription_session"] = "realtime.transcription_session"


@attrs.frozen(kw_only=True)
class SessionCreated:
    """The first event, before it is known which events the client understands: it has the fields of both."""

    type: Literal["session.created"] = "session.created"
    event_id: str
    session: SessionState
    id: str
    created: int
    """Unix time."""


# OpenAI's


@attrs.frozen(kw_only=True)
class SessionUpdated:
    type: Literal["session.updated"] = "session.updated"
    event_id: str
    session: SessionState


@attrs.frozen(kw_only=True)
class SpeechStarted:
    type: Literal["input_audio_buffer.speech_started"] = "input_audio_buffer.speech_started"
    event_id: str
    audio_start_ms: int
    item_id: str


@attrs.frozen(kw_only=True)
class SpeechStopped:
    type: Literal["input_audio_buffer.speech_stopped"] = "input_audio_buffer.speech_stopped"
    event_id: str
    audio_end_ms: int
    item_id: str


@attrs.frozen(kw_only=True)
class AudioCommitted:
    type: Literal["input_audio_buffer.committed"] = "input_audio_buffer.committed"
    event_id: str
    item_id: str
    previous_item_id: str | None


@attrs.frozen(kw_only=True)
class AudioCleared:
    type: Literal["input_audio_buffer.cleared"] = "input_audio_buffer.cleared"
    event_id: str


@attrs.frozen(kw_only=True)
class ItemDelta:
    type: Literal["conversation.item.input_audio_transcription.delta"] = (
        "conversation.item.input_audio_transcription.delta"
    )
    event_id: str
    item_id: str
    content_index: Literal[0] = 0
    delta: str


@attrs.frozen(kw_only=True)
class DurationUsage:
    type: Literal["duration"] = "duration"
    seconds: float


@attrs.frozen(kw_only=True)
class ItemCompleted:
    type: Literal["conversation.item.input_audio_transcription.completed"] = (
        "conversation.item.input_audio_transcription.completed"
    )
    event_id: str
    item_id: str
    content_index: Literal[0] = 0
    transcript: str
    usage: DurationUsage


@attrs.frozen(kw_only=True)
class OpenAIErrorDetail:
    type: str
    code: str | None
    message: str
    param: str | None = None
    event_id: str | None = None


@attrs.frozen(kw_only=True)
class ItemFailed:
    type: Literal["conversation.item.input_audio_transcription.failed"] = (
        "conversation.item.input_audio_transcription.failed"
    )
    event_id: str
    item_id: str
    content_index: Literal[0] = 0
    error: OpenAIErrorDetail


@attrs.frozen(kw_only=True)
class OpenAIError:
    type: Literal["error"] = "error"
    event_id: str
    error: OpenAIErrorDetail
