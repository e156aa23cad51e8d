"""Audio on its way to the engine core."""

from __future__ import annotations

import attrs

__all__ = ["MAX_AUDIO_SECONDS", "SAMPLING_RATE", "AudioInput"]

SAMPLING_RATE = 16_000
"""Samples per second of all audio beyond the decoder of files."""

MAX_AUDIO_SECONDS = 30
"""What a speech model hears at a time."""


@attrs.frozen(kw_only=True, eq=False)
class AudioInput:
    """What one sequence of a speech model is about."""

    digest: str
    """Of the samples: equal audio is encoded once."""
    samples: bytes = attrs.field(repr=False)
    """float32 in native byte order, one channel, `SAMPLING_RATE`; at most `MAX_AUDIO_SECONDS`."""
