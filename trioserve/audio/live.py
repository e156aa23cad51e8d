"""Audio that is still being spoken: samples as they come, and windows as soon as they can be cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import av
import numpy as np

from trioserve.audio_input import MAX_AUDIO_SECONDS, SAMPLING_RATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["FRAME", "LiveWindows", "Pcm16Decoder", "loudness_of", "num_frames"]


class Pcm16Decoder:
    """16-bit samples, little-endian, mono, of any rate, as they come."""

    def __init__(self, rate: int) -> None:
        """`rate` in samples per second."""
        self._rate = rate
        self._resampler = None if rate == SAMPLING_RATE else _open_resampler()

    def decode(self, data: bytes) -> NDArray[np.float32]:
        """[n]: mono, at `SAMPLING_RATE`, from -1 to 1. With another rate some milliseconds are held back, and
        come with what follows.

        Raises:
          ValueError: a sample is not whole.
        """
        samples = np.frombuffer(data, "<i2")
        if self._resampler is None:
            return samples.astype(np.float32) / np.float32(2**15)
        if not len(samples):
            return np.empty(0, np.float32)
        frame = av.AudioFrame.from_ndarray(samples[np.newaxis], format="s16", layout="mono")
        frame.sample_rate = self._rate
        return self._joined(frame)

    def finish(self) -> NDArray[np.float32]:
        """What was held back. From then on it is as new."""
        if self._resampler is None:
            return np.empty(0, np.float32)
        rest = self._joined(None)
        self._resampler = _open_resampler()
        return rest

    def _joined(self, frame: av.AudioFrame | None) -> NDArray[np.float32]:
        assert self._resampler is not None
        parts = [part.to_ndarray()[0] for part in self._resampler.resample(frame)]
        return np.concatenate([np.empty(0, np.float32), *parts])


def _open_resampler() -> av.AudioResampler:
    return av.AudioResampler(format="fltp", layout="mono", rate=SAMPLING_RATE)


FRAME = SAMPLING_RATE // 50
"""Samples whose loudness is looked at: 20 ms."""

_SILENCE = 1e-3
"""-60 dB of full scale, as the root of a frame's mean square: no speech is as quiet, by any microphone."""

_QUIET = 0.1
"""A frame is quiet if it has less than this part of the loudness of speech around it."""

_PAUSES = ((4.0, 0.5), (8.0, 0.3), (15.0, 0.15))
"""A window that is so many seconds long ends in a pause of so many: the longer, the less it takes."""

_SEARCH = 2.0
"""Where there was no pause at all, a window ends at the quietest point of so many seconds, the last ones."""

_SHORTEST = 0.1
"""Seconds; a rest that is shorter is nothing that was said."""

_AROUND = 5
"""Frames that are compared for the quietest point."""


def num_frames(seconds: float) -> int:
    """In so many seconds."""
    return round(seconds * SAMPLING_RATE / FRAME)


def loudness_of(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """[frames that are whole]: the root of each one's mean square."""
    count = len(samples) // FRAME
    frames = samples[: count * FRAME].reshape(count, FRAME)
    return np.asarray(np.sqrt(np.square(frames, dtype=np.float64).mean(axis=1)))


_MOST = num_frames(MAX_AUDIO_SECONDS)


def _least_pauses() -> NDArray[np.float64]:
    """[frames of the longest window]: how many frames of quiet, up to and with this one, end a window."""
    least = np.full(_MOST, np.inf)
    for seconds, pause in _PAUSES:
        least[num_frames(seconds) :] = num_frames(pause)
    return least


_LEAST_PAUSE = _least_pauses()


class LiveWindows:
    """Cuts audio into windows that a model can hear, in pauses, while it comes.

    What is silent all through is left out. So at most `MAX_AUDIO_SECONDS` are held.
    """

    def __init__(self) -> None:
        self._samples = np.empty(0, np.float32)
        self._loudness = np.empty(0)  # of the frames that are whole

    def push(self, samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        """Windows that `samples`, at `SAMPLING_RATE`, complete. To be read to the end."""
        self._append(samples)
        while cut := self._find_cut():
            yield from self._cut(cut)

    def finish(self) -> Iterator[NDArray[np.float32]]:
        """The rest, as a window."""
        if len(self._samples) >= _SHORTEST * SAMPLING_RATE:
            yield from self._cut(len(self._samples))
        self.clear()

    def clear(self) -> None:
        """Forget what is held."""
        self._samples, self._loudness = np.empty(0, np.float32), np.empty(0)

    @property
    def seconds(self) -> float:
        """Of audio that is held."""
        return len(self._samples) / SAMPLING_RATE

    def _append(self, samples: NDArray[np.float32]) -> None:
        self._samples = np.concatenate((self._samples, samples))
        new = loudness_of(self._samples[len(self._loudness) * FRAME :])
        self._loudness = np.concatenate((self._loudness, new))

    def _find_cut(self) -> int:
        """Samples until the first pause that ends a window; 0 if there is none yet."""
        loudness = self._loudness[:_MOST]
        if len(loudness) <= num_frames(_PAUSES[0][0]):
            return 0
        quiet = loudness < max(_SILENCE, _QUIET * np.percentile(loudness, 90))
        places = np.arange(len(loudness))
        pauses = places - np.maximum.accumulate(np.where(quiet, -1, places))  # how many were quiet up to here
        ends = np.flatnonzero(pauses >= _LEAST_PAUSE[: len(loudness)])
        if len(ends):
            return int(ends[0] + 1 - pauses[ends[0]] // 2) * FRAME
        return self._quietest() * FRAME if len(loudness) == _MOST else 0

    def _quietest(self) -> int:
        """The frame in whose surroundings the end of the longest window is quietest."""
        last = self._loudness[_MOST - num_frames(_SEARCH) : _MOST]
        around = np.convolve(last, np.ones(_AROUND), "valid")
        return _MOST - len(last) + int(np.argmin(around)) + _AROUND // 2

    def _cut(self, end: int) -> Iterator[NDArray[np.float32]]:
        window, self._samples = self._samples[:end], self._samples[end:].copy()
        loudness, self._loudness = self._loudness[: end // FRAME], self._loudness[end // FRAME :]
        if loudness.max(initial=0.0) >= _SILENCE:
            yield window
