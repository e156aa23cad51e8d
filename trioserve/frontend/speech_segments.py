"""Segments of a window's text, by the timestamps among its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.frontend.speech_tokens import SpeechTokens

__all__ = ["Piece", "cut_at_timestamps", "unheard_from"]

_LEAST_REST = 1.0
"""Seconds; what is shorter holds no words."""


@attrs.frozen(kw_only=True)
class Piece:
    """Some text of a window. Times are in seconds from the window's beginning."""

    start: float
    end: float
    token_ids: Sequence[int]
    """With its timestamps."""


def cut_at_timestamps(token_ids: Sequence[int], tokens: SpeechTokens, duration: float) -> Iterator[Piece]:
    """The text between timestamps. What no timestamp comes before begins with the window (or where the piece
    before it ends), and what none comes after ends with it. Pieces without text are left out."""
    start, piece, has_text = 0.0, list[int](), False
    for token in token_ids:
        seconds = tokens.seconds(token)
        piece.append(token)
        if seconds is None:
            has_text = has_text or token < tokens.eot
            continue
        time = min(seconds, duration)
        if has_text:
            yield Piece(start=start, end=max(start, time), token_ids=piece)
            piece, has_text = [], False
        else:
            piece = [token]
        start = time
    if has_text:
        yield Piece(start=start, end=max(start, duration), token_ids=piece)


def unheard_from(token_ids: Sequence[int], tokens: SpeechTokens, duration: float) -> float | None:
    """Where the part of the window begins that the text does not reach, in seconds; None if there is none.

    Text that ends with two timestamps (the end of a segment and the beginning of the next) says that more
    follows; one alone, that nothing does.
    """
    if len(token_ids) < 2:
        return None
    before, last = map(tokens.seconds, token_ids[-2:])
    if before is None or last is None or last < _LEAST_REST or duration - last < _LEAST_REST:
        return None
    return last
