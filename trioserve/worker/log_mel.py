"""What Whisper's encoder gets of audio: the logarithm of its power in bands of the mel scale.

As OpenAI's `whisper.audio.log_mel_spectrogram` and transformers' WhisperFeatureExtractor compute it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trioserve.audio_input import MAX_AUDIO_SECONDS, SAMPLING_RATE

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NUM_MEL_FRAMES", "LogMel"]

_FFT = 400
_HOP = 160
NUM_MEL_FRAMES = MAX_AUDIO_SECONDS * SAMPLING_RATE // _HOP
_FLOOR = 1e-10
_RANGE = 8.0
"""Powers of ten below the loudest that are kept."""


class LogMel:
    """Owns the filters of `num_bands` bands from 0 to 8,000 Hz."""

    def __init__(self, num_bands: int) -> None:
        self._filters = _mel_filters(num_bands)
        # A Hann window that begins at 0 and would be 0 again at its end.
        self._window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FFT) / _FFT)).astype(np.float32)

    def of(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """fp32 [NUM_MEL_FRAMES, bands] of at most 30 seconds; what is missing is silence.

        Only the frames that hear something are computed: all others have no power.
        """
        frames = _frames(samples)
        spectrum = np.fft.rfft(frames * self._window)
        power = spectrum.real**2 + spectrum.imag**2
        loudness = np.log10(np.maximum(power.astype(np.float32, copy=False) @ self._filters, _FLOOR))
        found = np.full((NUM_MEL_FRAMES, loudness.shape[1]), np.log10(np.float32(_FLOOR)), np.float32)
        found[: len(loudness)] = loudness
        np.maximum(found, found.max() - _RANGE, out=found)
        found += 4.0
        found /= 4.0
        return found


def _frames(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """fp32 [frames, _FFT]: around every _HOP-th sample. Before the beginning, and behind 30 seconds,
    the audio is mirrored."""
    num_samples = MAX_AUDIO_SECONDS * SAMPLING_RATE
    num_frames = min(NUM_MEL_FRAMES, (len(samples) + _FFT // 2) // _HOP + 1)
    half = _FFT // 2
    padded = np.zeros(half + num_samples + half, np.float32)
    padded[half : half + len(samples)] = samples
    padded[:half] = padded[half + 1 : _FFT + 1][::-1]
    padded[half + num_samples :] = padded[num_samples - 1 : half + num_samples - 1][::-1]
    return np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::_HOP][:num_frames]


def _mel_filters(num_bands: int) -> NDArray[np.float32]:
    """fp32 [frequencies, bands]: triangles of equal area, whose corners are equally far apart in mel.

    Slaney's scale (Auditory Toolbox, 1998) is linear below 1,000 Hz and logarithmic above.
    """
    frequencies = np.linspace(0.0, SAMPLING_RATE / 2, 1 + _FFT // 2)
    corners = _to_hertz(np.linspace(0.0, _to_mel(SAMPLING_RATE / 2), num_bands + 2))
    widths = np.diff(corners)
    slopes = corners - frequencies[:, None]
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling))
    return (filters * (2.0 / (corners[2:] - corners[:-2]))).astype(np.float32)


_LINEAR_STEP = 200.0 / 3
_LOGARITHMIC_FROM = 1000.0
_LOGARITHMIC_STEP = np.log(6.4) / 27.0


def _to_mel(hertz: float) -> float:
    if hertz < _LOGARITHMIC_FROM:
        return hertz / _LINEAR_STEP
    return float(_LOGARITHMIC_FROM / _LINEAR_STEP + np.log(hertz / _LOGARITHMIC_FROM) / _LOGARITHMIC_STEP)


def _to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    first = _LOGARITHMIC_FROM / _LINEAR_STEP
    above = _LOGARITHMIC_FROM * np.exp(_LOGARITHMIC_STEP * (mel - first))
    return np.where(mel < first, mel * _LINEAR_STEP, above)
