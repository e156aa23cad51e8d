"""Audio on its way to the engine core."""

from __future__ import annotations

import attrs

from trioserve.validators import integer, number, plain

__all__ = ["MAX_AUDIO_SECONDS", "MAX_BEAM_WIDTH", "SAMPLING_RATE", "AudioInput", "SpeechSearch"]

SAMPLING_RATE = 16_000
"""Samples per second of all audio beyond the decoder of files."""

MAX_AUDIO_SECONDS = 30
"""What a speech model hears at a time."""

MAX_BEAM_WIDTH = 5
"""Each beam of a sequence that runs may need memory for a text of its own."""


@attrs.frozen(kw_only=True)
class SpeechSearch:
    """A text is sought by beam search, and not drawn token by token: the one with the highest sum of logprobs
    / length ** length_penalty of those that the search finds. Validated at construction."""

    beam_width: int = attrs.field(
        default=MAX_BEAM_WIDTH,
        converter=plain,
        validator=integer(f"an integer from 1 to {MAX_BEAM_WIDTH}", least=1, most=MAX_BEAM_WIDTH),
    )
    length_penalty: float = attrs.field(
        default=1.0, converter=plain, validator=number("a number from -10 to 10", least=-10, most=10)
    )


@attrs.frozen(kw_only=True, eq=False)
class AudioInput:
    """What one sequence of a speech model is about."""

    digest: str
    """Of the samples: equal audio is encoded once."""
    samples: bytes = attrs.field(repr=False)
    """float32 in native byte order, one channel, `SAMPLING_RATE`; at most `MAX_AUDIO_SECONDS`."""
    search: SpeechSearch | None = None
    """How its text is found; None: as params say, token by token."""
