"""How a session speaks: in vLLM's events, or in OpenAI's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from trioserve.server.protocol.realtime_events import (
    AudioCleared,
    AudioCommitted,
    DurationUsage,
    ItemCompleted,
    ItemDelta,
    ItemFailed,
    OpenAIError,
    OpenAIErrorDetail,
    SessionState,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    TokenUsage,
    TranscriptionDelta,
    TranscriptionDone,
    VllmError,
)
from trioserve.server.realtime.item import Item, make_id

if TYPE_CHECKING:
    from trioserve.server.errors import Failure
    from trioserve.server.protocol.realtime import EventError

__all__ = ["Dialect", "OpenAIDialect", "VllmDialect"]


class Dialect(Protocol):
    """Each returns the event that says it; None where there is none."""

    def updated(self, session: SessionState) -> object | None: ...
    def started(self, item: Item, milliseconds: int) -> object | None: ...
    def stopped(self, item: Item, milliseconds: int) -> object | None: ...
    def committed(self, item: Item, previous: Item | None) -> object | None: ...
    def cleared(self) -> object | None: ...
    def delta(self, item: Item, text: str) -> object | None: ...
    def done(self, item: Item) -> object | None: ...
    def failed(self, item: Item, failure: Failure) -> object | None: ...
    def error(self, error: EventError) -> object | None: ...


class VllmDialect:
    needs_model = True
    """Audio is taken once the client has said for which model it is."""

    def updated(self, session: SessionState) -> None:
        return None

    def started(self, item: Item, milliseconds: int) -> None:
        return None

    def stopped(self, item: Item, milliseconds: int) -> None:
        return None

    def committed(self, item: Item, previous: Item | None) -> None:
        return None

    def cleared(self) -> None:
        return None

    def delta(self, item: Item, text: str) -> TranscriptionDelta:
        return TranscriptionDelta(delta=text)

    def done(self, item: Item) -> TranscriptionDone:
        total = item.num_prompt_tokens + item.num_generation_tokens
        usage = TokenUsage(
            prompt_tokens=item.num_prompt_tokens,
            completion_tokens=item.num_generation_tokens,
            total_tokens=total,
        )
        return TranscriptionDone(text=item.text, usage=usage)

    def failed(self, item: Item, failure: Failure) -> VllmError:
        return VllmError(error=failure.detail.message, code="processing_error")

    def error(self, error: EventError) -> VllmError:
        return VllmError(error=error.message, code=error.code)


class OpenAIDialect:
    needs_model = False

    def updated(self, session: SessionState) -> SessionUpdated:
        return SessionUpdated(event_id=make_id("event"), session=session)

    def started(self, item: Item, milliseconds: int) -> SpeechStarted:
        return SpeechStarted(event_id=make_id("event"), audio_start_ms=milliseconds, item_id=item.id)

    def stopped(self, item: Item, milliseconds: int) -> SpeechStopped:
        return SpeechStopped(event_id=make_id("event"), audio_end_ms=milliseconds, item_id=item.id)

    def committed(self, item: Item, previous: Item | None) -> AudioCommitted:
        previous_id = None if previous is None else previous.id
        return AudioCommitted(event_id=make_id("event"), item_id=item.id, previous_item_id=previous_id)

    def cleared(self) -> AudioCleared:
        return AudioCleared(event_id=make_id("event"))

    def delta(self, item: Item, text: str) -> ItemDelta:
        return ItemDelta(event_id=make_id("event"), item_id=item.id, delta=text)

    def done(self, item: Item) -> ItemCompleted:
        usage = DurationUsage(seconds=math.ceil(round(item.seconds, 2)))
        return ItemCompleted(event_id=make_id("event"), item_id=item.id, transcript=item.text, usage=usage)

    def failed(self, item: Item, failure: Failure) -> ItemFailed:
        detail = failure.detail
        error = OpenAIErrorDetail(
            type=detail.type, code=detail.code or "processing_error", message=detail.message
        )
        return ItemFailed(event_id=make_id("event"), item_id=item.id, error=error)

    def error(self, error: EventError) -> OpenAIError:
        detail = OpenAIErrorDetail(
            type="invalid_request_error",
            code=error.code,
            message=error.message,
            param=error.param,
            event_id=error.event_id,
        )
        return OpenAIError(event_id=make_id("event"), error=detail)
