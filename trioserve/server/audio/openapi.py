"""What the description says of the routes of speech."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.server.openapi_route import GENERATION_FAILURES, Body, Route
from trioserve.server.protocol.speech import (
    TRANSCRIPTION_READER,
    TRANSLATION_READER,
    SpokenText,
    SpokenTextDelta,
    SpokenTextDone,
    VerboseTranscription,
)

if TYPE_CHECKING:
    from trioserve.server.protocol.reading import RequestReader

__all__ = ["SPEECH_ROUTES"]

_TEXT = {"type": "string"}


def _speech(name: str, summary: str, reader: RequestReader[Any]) -> Route:
    return Route(
        path=f"/v1/audio/{name}",
        method="post",
        operation_id=f"create_{name.removesuffix('s')}",
        summary=summary,
        answers={
            200: (
                Body.json(SpokenText | VerboseTranscription),
                Body("text/plain", _TEXT),
                Body("application/x-subrip", _TEXT),
                Body("text/vtt", _TEXT),
                Body.events(SpokenTextDelta | SpokenTextDone),
            )
        },
        failures=GENERATION_FAILURES - {415},
        reader=reader,
        file="file",
    )


SPEECH_ROUTES = (
    _speech("transcriptions", "What is said, in writing", TRANSCRIPTION_READER),
    _speech("translations", "What is said, in English", TRANSLATION_READER),
)
