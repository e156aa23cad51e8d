"""Text in which something is looked for while it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regex import Match, Pattern

__all__ = ["split_before"]


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
