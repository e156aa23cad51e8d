"""Where somebody begins to speak, and where that ends, told from loudness alone."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np

from trioserve.audio.live import FRAME, loudness_of, num_frames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["TurnDetector", "TurnEnd", "TurnStart"]

_LEAST = 0.02
"""As the root of a frame's mean square: what is as quiet is no speech, at the threshold of 1."""

_OVER_NOISE = 3.0
"""Speech is so many times as loud as the noise of the room."""

_MEMORY = 125
"""Frames, of which the quietest is the noise of the room: speech has a gap in 2.5 seconds."""

_START = 3
"""Frames that are loud before it counts as speech: a click is none."""


@attrs.frozen
class TurnStart:
    """What follows was said."""

    at: int
    """Samples since the beginning of all."""


@attrs.frozen
class TurnEnd:
    """What came before was a turn."""

    at: int


Part: TypeAlias = "TurnStart | TurnEnd | NDArray[np.float32]"


class TurnDetector:
    """Lets through what is said, and says where it begins and ends. What lies between is dropped."""

    def __init__(self, *, threshold: float, padding: float, silence: float) -> None:
        """
        Args:
          threshold: from 0 to 1: the higher, the louder speech has to be.
          padding: seconds before a turn that belong to it.
          silence: seconds without speech that end it, and belong to it.
        """
        self._least = _LEAST * threshold
        self._padding = num_frames(padding)
        self._silence = max(1, num_frames(silence))
        self._recent: deque[float] = deque(maxlen=_MEMORY)  # loudness
        self._is_speech = False
        self._other = 0  # frames in a row that say otherwise
        self._held = np.empty(0, np.float32)  # what was not let through yet, and may be
        self._num_seen = 0  # whole frames of it that were looked at
        self._position = 0  # of its beginning

    def push(self, samples: NDArray[np.float32]) -> Iterator[Part]:
        """What is known by these samples: parts of turns, and where they begin and end. To be read to the
        end."""
        held = np.concatenate((self._held, samples))
        loudness = loudness_of(held[self._num_seen * FRAME :]).tolist()
        passed = 0  # frames
        for end, loud in enumerate(loudness, self._num_seen + 1):
            if not self._changes(loud):
                continue
            if self._is_speech:
                passed = max(passed, end - _START - self._padding)
                yield TurnStart(self._position + passed * FRAME)
            else:
                yield held[passed * FRAME : end * FRAME]
                yield TurnEnd(self._position + end * FRAME)
                passed = end
        num_seen = self._num_seen + len(loudness)
        if self._is_speech:
            yield held[passed * FRAME : num_seen * FRAME]
            passed = num_seen
        passed = max(passed, num_seen - _START - self._padding)
        self._held, self._num_seen = held[passed * FRAME :].copy(), num_seen - passed
        self._position += passed * FRAME

    def finish(self) -> NDArray[np.float32]:
        """What is held of a turn that goes on. From then on none does."""
        rest = self._held if self._is_speech else self._held[:0]
        self._position += len(self._held)
        self._held, self._num_seen, self._is_speech, self._other = np.empty(0, np.float32), 0, False, 0
        return rest

    def _changes(self, loudness: float) -> bool:
        """Whether a turn begins or ends with this frame."""
        self._recent.append(loudness)
        is_loud = loudness > max(self._least, _OVER_NOISE * min(self._recent))
        self._other = 0 if is_loud is self._is_speech else self._other + 1
        if self._other < (self._silence if self._is_speech else _START):
            return False
        self._is_speech, self._other = not self._is_speech, 0
        return True
