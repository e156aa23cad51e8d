"""Text in which something is looked for while it comes, in a time that grows with its length only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regex import Match, Pattern

__all__ = ["in_pieces", "split_before"]

_PIECE = 4096
"""Characters. Whoever takes a text's beginning away from it copies the rest, again and again: of a piece that
is nothing."""


def in_pieces(text: str) -> list[str]:
    """The text cut so that none is long; one that is empty is one piece."""
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)] or [text]


def split_before(pattern: Pattern[str], text: str) -> tuple[str, Match[str] | None, str]:
    """(what is before the first match, the match, what is after it).

    Without a match, what is at the end of the text and may be the beginning of one is the last of the three.
    """
    found = pattern.search(text, partial=True)
    if found is None:
        return text, None, ""
    if found.partial:
        return text[: found.start()], None, text[found.start() :]
    return text[: found.start()], found, text[found.end() :]
