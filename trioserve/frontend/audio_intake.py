"""Audio on its way in: decoded in threads, as much as memory has room for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import trio

from trioserve.errors import InvalidRequestError
from trioserve.validators import shown

if TYPE_CHECKING:
    from trioserve.audio.limits import AudioLimits
    from trioserve.audio.speech import Speech

__all__ = ["Audio", "AudioIntake", "HeldSpeech"]

Audio: TypeAlias = "Speech | bytes | str | os.PathLike[str]"
"""Decoded audio, the bytes of a file, or its path."""

_MOST_THREADS = 2
"""Decoding takes a core, and the engine needs the others."""

_MOST_SECONDS = 7200.0
"""Of decoded audio that is held at a time, unless one alone is longer: 460 MB. Who decodes meanwhile may have
as much again."""


class AudioIntake:
    """Of one AsyncLLM. The bound on memory: what is held, and one audio in each thread."""

    def __init__(self, most_seconds: float = _MOST_SECONDS) -> None:
        self._threads = trio.CapacityLimiter(_MOST_THREADS)
        self._most_seconds = most_seconds
        self._held = 0.0
        self._released = trio.lowlevel.ParkingLot()

    async def take(self, audio: Audio, limits: AudioLimits) -> HeldSpeech:
        """Its samples, which must be released. A cancellation ends the decoding at the next frame.

        Raises:
          InvalidRequestError: it is no audio, or beyond the limits.
        """
        async with self._threads:
            speech = await trio.to_thread.run_sync(_load, audio, limits)
            while self._held and self._held + speech.duration > self._most_seconds:
                await self._released.park()
            self._held += speech.duration
        return HeldSpeech(self, speech)

    def release(self, seconds: float) -> None:
        self._held -= seconds
        self._released.unpark_all()

    @property
    def seconds_held(self) -> float:
        return self._held


class HeldSpeech:
    """Decoded audio that counts until it is released."""

    def __init__(self, intake: AudioIntake, speech: Speech) -> None:
        self.speech = speech
        self._intake = intake
        self._released = False

    def release(self) -> None:
        """Not a checkpoint. A second call does nothing."""
        if not self._released:
            self._released = True
            self._intake.release(self.speech.duration)


def _load(audio: Audio, limits: AudioLimits) -> Speech:
    # Imported here: numpy and FFmpeg take 40 MB, and only a model that hears needs them.
    from trioserve.audio.decoding import decode_audio  # noqa: PLC0415
    from trioserve.audio.speech import Speech  # noqa: PLC0415

    if isinstance(audio, Speech):
        if not 0 < audio.duration <= limits.max_duration:
            raise InvalidRequestError(
                f"audio must be more than 0 and at most {limits.max_duration:g} s long, "
                f"got {audio.duration:.1f} s.",
                parameter="audio",
            )
        return audio
    data = audio if isinstance(audio, bytes) else _read_file(audio, limits)
    return decode_audio(data, limits, trio.from_thread.check_cancelled)


def _read_file(path: object, limits: AudioLimits) -> bytes:
    """At most one byte more than is allowed."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidRequestError(
            f"audio must be Speech, the bytes of a file, or a path, got {shown(path)}.", parameter="audio"
        )
    try:
        with Path(path).open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except OSError as error:
        raise InvalidRequestError(f"audio cannot be read: {error}.", parameter="audio") from error
