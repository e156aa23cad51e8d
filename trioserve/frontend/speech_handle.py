"""What an AsyncLLM does with speech."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trioserve.errors import InvalidRequestError
from trioserve.frontend.arguments import check_type
from trioserve.frontend.audio_intake import AudioIntake
from trioserve.frontend.speech_tokens import SpeechTokens
from trioserve.frontend.transcription import Transcriber, TranscriptionStream
from trioserve.frontend.transcription_params import TranscriptionParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from trioserve.audio.limits import AudioLimits
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.frontend.audio_intake import Audio
    from trioserve.frontend.input_processor import Routing
    from trioserve.frontend.prompts import AudioPrompt
    from trioserve.frontend.requests import Requests
    from trioserve.observability.metrics import EngineMetrics

__all__ = ["SpeechHandle", "make_transcriber"]


def make_transcriber(
    config: EngineConfig, model: ResolvedModel, requests: Requests, metrics: EngineMetrics
) -> Transcriber | None:
    """None for a model that does not hear.

    Raises:
      ModelNotSupportedError: it hears, and its tokenizer has no tokens for that.
    """
    if "transcription" not in model.tasks:
        return None
    return Transcriber(
        requests=requests,
        tokens=SpeechTokens.of(requests.tokenizer),
        intake=AudioIntake(),
        count_audio=metrics.record_audio,
        context_length=model.max_model_len,
        most_seats=config.scheduler.max_num_seqs,
    )


class SpeechHandle:
    """A base of `AsyncLLM`."""

    _requests: Requests
    _transcriber: Transcriber | None
    _route: Callable[..., Awaitable[Routing]]

    def transcribe(
        self,
        audio: Audio,
        params: TranscriptionParams | None = None,
        *,
        limits: AudioLimits | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> TranscriptionStream:
        """Speech of any length to text, as a scope: `async with llm.transcribe(...) as stream`.

        Reading the stream gives text and segments as they come; `await stream.finish()` gives the whole.

        Args:
          audio: the bytes of a file (WAV, FLAC, MP3, Ogg, M4A, WebM, ...), its path, or samples (`Speech`).
          limits: how much audio is taken; by default 25 MiB of file, and two hours.
          request_id: a name for `abort`; made up if not given, and need not be unique.

        Raises:
          InvalidRequestError: the model does not hear. Entering the scope raises it, too: see
            `TranscriptionStream.open`.
        """
        return TranscriptionStream(
            self._find_transcriber(),
            audio,
            TranscriptionParams() if params is None else check_type("params", params, TranscriptionParams),
            limits=limits,
            route=partial(self._route, priority),
            request_id=request_id,
        )

    async def align(self, prompt: AudioPrompt, token_ids: Sequence[int]) -> Sequence[float]:
        """Seconds, from the audio's beginning, at which each of `token_ids` begins to be said: of what a
        speech model has written after `prompt`, with timestamps and without its end. Cancelling drops the
        result.

        Raises:
          InvalidRequestError: it is no speech model, there is no token, or there are too many.
          EngineGenerateError: it sleeps.
          EngineDeadError, EngineRestartingError, ClosedError: there is no engine.
        """
        return await self._requests.align(prompt, token_ids)

    def check_transcription(self, params: TranscriptionParams) -> None:
        """Whether `transcribe` would take these, of any audio.

        Raises:
          InvalidRequestError: the model does not hear, does not know the language, or translates nothing.
        """
        self._find_transcriber().listener(params)

    def _find_transcriber(self) -> Transcriber:
        if self._transcriber is None:
            raise InvalidRequestError(
                "audio must be given to a speech model (one with the task transcription), and this is none.",
                parameter="model",
            )
        return self._transcriber
