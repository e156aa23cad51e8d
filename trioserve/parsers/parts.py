"""What an answer is made of, piece by piece."""

from __future__ import annotations

import attrs

__all__ = ["CallPart", "Part", "ReasoningPart", "TextPart"]


@attrs.frozen
class ReasoningPart:
    """What the model thinks, without the marks around it."""

    text: str
    """Never empty."""


@attrs.frozen
class TextPart:
    """What it says to the user."""

    text: str
    """Never empty."""


@attrs.frozen
class CallPart:
    """What is new of one call."""

    index: int
    """Of the call in the answer."""
    name: str | None
    """Of the call that begins here; None: it has begun before."""
    arguments: str
    """JSON text: empty where a call begins, and else not. A call's parts joined are its arguments, of which
    the end may be missing if the answer was cut off."""


Part = ReasoningPart | TextPart | CallPart
