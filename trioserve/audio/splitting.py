"""Cutting long audio into windows that a model can hear, at quiet points."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.audio_input import MAX_AUDIO_SECONDS, SAMPLING_RATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["Window", "most_windows", "split_at_quiet"]

_SEARCH = 5.0
"""Seconds at the end of a window in which a pause is looked for. In so many, most who speak make one between
two sentences; with one second, it is often one within a word."""

_QUIET = 6400
"""Samples (0.4 s) whose energy is compared: pauses between sentences are as long, those between words not."""

_ABOUT = 1.5
"""Times the least energy is about as quiet."""

_NOTHING = 1e-6
"""An energy (the sum of squares) that is none, but for the rounding of long sums."""


@attrs.frozen
class Window:
    """A part of some audio, in samples: from `start` to before `end`."""

    start: int
    end: int

    @property
    def offset(self) -> float:
        """Seconds from the audio's beginning."""
        return self.start / SAMPLING_RATE

    @property
    def duration(self) -> float:
        return (self.end - self.start) / SAMPLING_RATE


def split_at_quiet(
    samples: NDArray[np.float32], *, longest: float = MAX_AUDIO_SECONDS, search: float = _SEARCH
) -> Iterator[Window]:
    """Windows of at most `longest` seconds, one after the other, that together are all of `samples`.

    Each but the last ends at the quietest point of its last `search` seconds.
    """
    most, span = int(longest * SAMPLING_RATE), int(search * SAMPLING_RATE)
    start = 0
    while len(samples) - start > most:
        end = start + most - span + _quietest(samples[start + most - span : start + most])
        yield Window(start, end)
        start = end
    yield Window(start, len(samples))


def most_windows(seconds: float) -> int:
    """That `split_at_quiet` makes of so many seconds, at most."""
    return 1 + max(0, math.ceil((seconds - MAX_AUDIO_SECONDS) / (MAX_AUDIO_SECONDS - _SEARCH)))


def _quietest(samples: NDArray[np.float32]) -> int:
    """The middle of the 0.4 s with the least energy, or of later ones that are about as quiet: a window that
    begins with silence is heard worse than one that ends with it."""
    energy = np.concatenate(([0.0], np.cumsum(np.square(samples, dtype=np.float64))))
    width = min(_QUIET, len(samples))
    around = energy[width:] - energy[:-width]
    return int(np.flatnonzero(around <= _ABOUT * around.min() + _NOTHING)[-1]) + width // 2
