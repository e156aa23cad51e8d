"""The routes of models that hear: OpenAI's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.audio.limits import AudioLimits
from trioserve.server.audio.speech import SpeechToText
from trioserve.server_args import FORM_FIELDS_SIZE

if TYPE_CHECKING:
    from trioserve.frontend.transcription_params import SpeechTask
    from trioserve.server.door import Door
    from trioserve.server.request_scope import App
    from trioserve.server.served_models import ServedModels
    from trioserve.server_args import ServerArgs

__all__ = ["add_speech"]

_ROUTES: tuple[tuple[str, SpeechTask], ...] = (
    ("transcriptions", "transcribe"),
    ("translations", "translate"),
)


def add_speech(app: App, door: Door, models: ServedModels, args: ServerArgs) -> None:
    """They belong to all models: the form says which is meant. Without one that hears, they say so."""
    limits = AudioLimits(
        max_bytes=args.max_audio_size,
        max_duration=args.max_audio_duration,
        max_decode_seconds=args.max_audio_decode_time,
    )
    for name, task in _ROUTES:
        path = f"/v1/audio/{name}"
        if models.with_task("transcription"):
            app.body_limits[path] = args.max_audio_size + FORM_FIELDS_SIZE
        handler = SpeechToText(models, task, limits)
        app.post(path, endpoint=name)(door.guard(handler.create))
