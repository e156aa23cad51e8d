"""Finding stop strings in text that comes in pieces, without showing a part of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Passes text on, but for the end of it that may be the beginning of a stop string.

    Text that comes before `armed` counts for nothing: a stop string must lie wholly in the text pushed while
    armed, as min_tokens demands.
    """

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing comes after it."""

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now that `text` has come."""
        if not armed:
            return text
        text = self._held + text
        found = self._find(text)
        if found is not None:
            start, string = found
            self.matched, self._held = string, ""
            return text[: start + len(string)] if self._include else text[:start]
        keep = self._length_of_possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """The earliest match; of two at the same place, the one given first."""
        matches = ((text.find(string), order) for order, string in enumerate(self._strings))
        first = min((match for match in matches if match[0] >= 0), default=None)
        return None if first is None else (first[0], self._strings[first[1]])

    def _length_of_possible_start(self, text: str) -> int:
        """The longest end of `text` with which a stop string begins."""
        longest = max((len(string) - 1 for string in self._strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0
