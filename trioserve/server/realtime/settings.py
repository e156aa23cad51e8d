"""What a session is told about the audio that comes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.transcription_params import TranscriptionParams
from trioserve.server.errors import ApiError
from trioserve.server.protocol.realtime import (
    AS_BEFORE,
    AudioFormat,
    EventError,
    InputAudio,
    InputTranscription,
    SessionAudio,
    SessionUpdate,
    TurnDetection,
)
from trioserve.server.protocol.realtime_events import SessionCreated, SessionState
from trioserve.server.realtime.item import make_id
from trioserve.server.served_models import ServedModels
from trioserve.server.service import Service

__all__ = ["SessionSettings"]

_VLLM_RATE, _OPENAI_RATE = 16_000, 24_000


@attrs.frozen(kw_only=True, eq=False)
class SessionSettings:
    """What holds for audio that comes now; for windows that were cut before, what held then."""

    models: ServedModels
    service: Service
    """The model that hears."""
    is_openai: bool
    """The client speaks OpenAI's events; else vLLM's."""
    is_model_said: bool = False
    session_id: str = attrs.field(factory=lambda: make_id("sess"))
    rate: int = _VLLM_RATE
    """Samples per second, as they come."""
    language: str | None = None
    prompt: str = ""
    keywords: Sequence[str] = ()
    turn_detection: TurnDetection | None = None
    """None: the client ends what is said."""

    @classmethod
    def begin(cls, models: ServedModels, name: str | None, *, is_openai: bool) -> SessionSettings:
        """
        Raises:
          ApiError: no model is served under this name (404).
          InvalidRequestError: it does not hear.
        """
        return cls(
            models=models,
            service=_pick(models, name),
            is_openai=is_openai,
            rate=_OPENAI_RATE if is_openai else _VLLM_RATE,
        )

    def updated(self, event: SessionUpdate) -> SessionSettings:
        """With what a client says; what it does not say stays, and an empty text takes back.

        Raises:
          EventError: the model is not served, does not hear, or does not know the language.
        """
        given, told = event.session, _told(event)
        settings = self if given is None or self.is_openai else self._as_openai()
        audio = _input(event) or InputAudio()
        is_as_before = audio.turn_detection is AS_BEFORE
        settings = attrs.evolve(
            settings._with_model(told.model, event.event_id),
            rate=settings.rate if audio.format is None else audio.format.rate,
            turn_detection=self.turn_detection if is_as_before else audio.turn_detection,
            language=self.language if told.language is None else told.language or None,
            prompt=self.prompt if told.prompt is None else told.prompt,
            keywords=self.keywords if told.keywords is None else told.keywords,
        )
        settings._check(event.event_id)
        return settings

    def _as_openai(self) -> SessionSettings:
        return attrs.evolve(self, is_openai=True, rate=_OPENAI_RATE)

    def _with_model(self, name: str | None, event_id: str | None) -> SessionSettings:
        if not name:
            return self
        try:
            service = _pick(self.models, name)
        except (ApiError, InvalidRequestError) as error:
            raise EventError("model_not_found", str(error), "model", event_id) from None
        return attrs.evolve(self, service=service, is_model_said=True)

    def _check(self, event_id: str | None) -> None:
        try:
            self.service.llm.check_transcription(self.params(None))
        except InvalidRequestError as error:
            raise EventError("invalid_event", str(error), error.parameter, event_id) from None

    def params(self, heard_language: str | None) -> TranscriptionParams:
        """How a window is heard. `heard_language`: of the windows before, where the client has said none.

        Raises:
          InvalidRequestError: a value is wrong.
        """
        return TranscriptionParams(
            language=self.language or heard_language,
            prompt=self.prompt,
            hotwords=", ".join(self.keywords),
            timestamps="none",
        )

    def state(self) -> SessionState:
        """In OpenAI's words."""
        transcription = InputTranscription(
            model=self.service.model_names[0],
            language=self.language,
            prompt=self.prompt,
            keywords=list(self.keywords) or None,
        )
        audio = InputAudio(
            format=AudioFormat(rate=self.rate),
            transcription=transcription,
            turn_detection=self.turn_detection,
        )
        return SessionState(id=self.session_id, type="transcription", audio=SessionAudio(input=audio))

    def created(self) -> SessionCreated:
        return SessionCreated(
            event_id=make_id("event"), session=self.state(), id=self.session_id, created=int(time.time())
        )


def _pick(models: ServedModels, name: str | None) -> Service:
    return models.pick(name, models.with_task("transcription"))


def _told(event: SessionUpdate) -> InputTranscription:
    """vLLM's event in OpenAI's words, or OpenAI's."""
    if event.session is None:
        return InputTranscription(model=event.model, language=event.language, prompt=event.prompt)
    audio = _input(event)
    return (audio and audio.transcription) or InputTranscription()


def _input(event: SessionUpdate) -> InputAudio | None:
    audio = event.session and event.session.audio
    return audio.input if audio else None
