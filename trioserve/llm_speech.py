"""What `LLM` does with speech."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trioserve.frontend.arguments import check_type
from trioserve.frontend.transcription_params import TranscriptionParams
from trioserve.progress_bar import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioserve.audio.limits import AudioLimits
    from trioserve.frontend.audio_intake import Audio
    from trioserve.frontend.transcription_outputs import Transcription
    from trioserve.llm_engine import LLMEngine

__all__ = ["SpeechMethods"]

_MOST_AT_A_TIME = 16
"""Audios; more do not fill the engine any better, and each holds its samples."""


class SpeechMethods:
    """A base of `LLM`."""

    _engine: LLMEngine

    def transcribe(
        self,
        audio: Audio | Sequence[Audio],
        params: TranscriptionParams | None = None,
        *,
        limits: AudioLimits | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[Transcription]:
        """The text of one or many audios, in their order.

        Args:
          audio: files as bytes or by their paths, or samples (`Speech`).
          params: of all of them; by default segments with timestamps, in the language that is found.
          limits: how much audio each may be.
          use_tqdm: a progress bar; see `trioserve.progress_bar.ProgressBar`.

        Raises:
          InvalidRequestError: the model does not hear, an audio is none, or the model cannot do what `params`
            ask for.
          EngineGenerateError: one failed inside the engine.
          EngineDeadError: the engine core has died.
          ClosedError: this object was closed.

        If it raises, all of its transcriptions are over.
        """
        params = (
            TranscriptionParams() if params is None else check_type("params", params, TranscriptionParams)
        )
        audios = _to_audios(audio)
        with ProgressBar(len(audios), use_tqdm, what="Transcribed audio") as progress:
            return self._engine.transcribe(
                audios,
                params,
                limits=limits,
                concurrency_limit=_MOST_AT_A_TIME,
                on_result=lambda done: progress.count(1, done.num_prompt_tokens, done.num_generation_tokens),
            )


def _to_audios(audio: Audio | Sequence[Audio]) -> Sequence[Audio]:
    if isinstance(audio, Sequence) and not isinstance(audio, str | bytes | os.PathLike):
        return audio
    return [audio]
