"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import attrs
from quart import Response

from trioserve.audio.limits import AudioLimits
from trioserve.audio_input import MAX_BEAM_WIDTH
from trioserve.errors import InvalidRequestError
from trioserve.frontend.languages import LANGUAGES
from trioserve.frontend.transcription_params import SpeechTask, TranscriptionParams
from trioserve.server.audio.events import start_speech_events
from trioserve.server.audio.subtitles import to_srt, to_vtt
from trioserve.server.errors import naming
from trioserve.server.forms import read_form
from trioserve.server.model_routes import hand_over
from trioserve.server.protocol.form_values import typed_values
from trioserve.server.protocol.speech import (
    TRANSCRIPTION_READER,
    TRANSLATION_READER,
    DurationUsage,
    SpokenText,
    SpokenWord,
    TokenUsage,
    VerboseSegment,
    VerboseTranscription,
)
from trioserve.server.replies import json_reply, text_reply
from trioserve.server.request_scope import limit_request, request_stack
from trioserve.server.served_models import ServedModels

if TYPE_CHECKING:
    from trioserve.frontend.transcription_outputs import SpeechSegment, Transcription
    from trioserve.frontend.transcription_params import TimestampKind
    from trioserve.server.protocol.speech import TranscriptionRequest
    from trioserve.server.service import Service

__all__ = ["SpeechToText"]

_AUDIO_TOKENS_PER_SECOND = 50
"""What Whisper's encoder makes of audio."""

_FIELDS = {"max_tokens": "max_completion_tokens"}
"""Parameters of ours -> the fields that clients set them by."""

_SAMPLING = (
    "seed", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


@attrs.frozen(eq=False)
class SpeechToText:
    """The handler of one of the two. The engine's work ends with the scope of the HTTP request."""

    _models: ServedModels
    _task: SpeechTask
    _limits: AudioLimits

    async def create(self) -> Response:
        able = self._models.with_task("transcription")
        if not able:
            self._models.pick(None, able)  # says so, before anything is uploaded in vain
        form = await read_form(max_file_size=self._limits.max_bytes)
        reader = TRANSCRIPTION_READER if self._task == "transcribe" else TRANSLATION_READER
        request = reader.read_values(typed_values(form.fields, reader.kind))
        service = self._models.pick(request.model, able)
        file = form.files.get("file")
        if file is None:
            found = "a plain value, without a file name" if "file" in form.fields else "none"
            raise InvalidRequestError(f"file must be an audio file, got {found}.", parameter="file")
        return await hand_over(service, partial(self._answer, service, request, file), is_guarded=True)

    async def _answer(self, service: Service, request: TranscriptionRequest, file: bytes) -> Response:
        limit_request(request.timeout)
        head = service.reply_head("transcription", request.request_id, request.model)
        with naming(_FIELDS):
            stream = service.llm.transcribe(
                file,
                _params(request, self._task),
                limits=self._limits,
                request_id=head.id,
                priority=request.priority or 0,
            )
            request_stack().callback(stream.release)
            await stream.open()
            if request.stream:
                return await start_speech_events(stream, _token_usage, _FIELDS)
            return self._reply(request, await stream.finish())

    def _reply(self, request: TranscriptionRequest, result: Transcription) -> Response:
        match request.form:
            case "text":
                return text_reply(result.text + "\n")
            case "srt":
                return Response(to_srt(result.segments), content_type="application/x-subrip; charset=utf-8")
            case "vtt":
                return Response(to_vtt(result.segments), content_type="text/vtt; charset=utf-8")
            case "verbose_json":
                return json_reply(self._verbose(request, result))
        is_translation = self._task == "translate"
        return json_reply(
            SpokenText(text=result.text)
            if is_translation
            else SpokenText(text=result.text, usage=_duration_usage(result))
        )

    def _verbose(self, request: TranscriptionRequest, result: Transcription) -> VerboseTranscription:
        is_translation = self._task == "translate"
        answer = VerboseTranscription(
            task=self._task,
            language="english" if is_translation else LANGUAGES.get(result.language, result.language),
            duration=result.duration,
            text=result.text,
        )
        if "segment" in request.granularities:
            answer = attrs.evolve(answer, segments=[_segment(segment) for segment in result.segments])
        if "word" in request.granularities:
            words = [SpokenWord(word=each.word, start=each.start, end=each.end) for each in result.words]
            answer = attrs.evolve(answer, words=words)
        return answer if is_translation else attrs.evolve(answer, usage=_duration_usage(result))


def _params(request: TranscriptionRequest, task: SpeechTask) -> TranscriptionParams:
    given = {name: getattr(request, name) for name in (*_SAMPLING, "length_penalty")}
    temperature = request.temperature or 0.0
    return TranscriptionParams(
        task=task,
        language=request.language,
        prompt=request.prompt or "",
        hotwords=" ".join([request.hotwords or "", *(request.keywords or ())]),
        # Text that a client has seen cannot be taken back, so with a stream the first draw is the last.
        temperature=(temperature,) if request.stream else temperature,
        timestamps=_timestamps(request),
        max_tokens=request.max_completion_tokens,
        beam_width=_beam_width(request),
        **{name: value for name, value in given.items() if value is not None},
    )


def _beam_width(request: TranscriptionRequest) -> int:
    """A stream is for those who want to see text as it is written, which a search has none of."""
    wants_search = not request.stream if request.use_beam_search is None else request.use_beam_search
    return request.beam_width or (MAX_BEAM_WIDTH if wants_search else 1)


def _timestamps(request: TranscriptionRequest) -> TimestampKind:
    if request.form in {"json", "text"}:
        return "none"
    return "word" if "word" in request.granularities else "segment"


def _segment(segment: SpeechSegment) -> VerboseSegment:
    return VerboseSegment(
        **{field.name: getattr(segment, field.name) for field in attrs.fields(VerboseSegment)}
    )


def _duration_usage(result: Transcription) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(result.duration))


def _token_usage(result: Transcription) -> TokenUsage:
    return TokenUsage.of(
        text=result.num_prompt_tokens,
        audio=math.ceil(result.duration * _AUDIO_TOKENS_PER_SECOND),
        output=result.num_generation_tokens,
    )
