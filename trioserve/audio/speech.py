"""Decoded audio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.audio_input import SAMPLING_RATE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Speech"]


@attrs.frozen(eq=False)
class Speech:
    """Audio as models take it."""

    samples: NDArray[np.float32]
    """[n]: mono, at `SAMPLING_RATE`, from -1 to 1."""

    @classmethod
    def from_pcm16(cls, data: bytes) -> Speech:
        """Of 16-bit samples, little-endian, mono, at `SAMPLING_RATE`."""
        return cls(np.frombuffer(data, "<i2").astype(np.float32) / np.float32(2**15))

    @classmethod
    def from_samples(cls, samples: Sequence[float] | NDArray[np.floating]) -> Speech:
        """Of numbers from -1 to 1."""
        return cls(np.ascontiguousarray(samples, dtype=np.float32))

    @property
    def duration(self) -> float:
        """In seconds."""
        return len(self.samples) / SAMPLING_RATE
