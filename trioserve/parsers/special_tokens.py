"""Special tokens in an answer that is read with them, since some are marks: the others are not shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import regex

from trioserve.parsers.held_back import in_pieces, split_before

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trioserve.parsers.answer_parser import AnswerParser
    from trioserve.parsers.parts import Part

__all__ = ["SpecialTokens", "WithoutSpecialTokens"]


class SpecialTokens:
    """Those that are to be left out; made once for a model, which may have thousands."""

    def __init__(self, texts: Collection[str]) -> None:
        self.pattern = regex.compile("|".join(map(regex.escape, sorted(texts))) or "(?!)")
        self.first_characters = frozenset(text[0] for text in texts if text)

    def may_be_in(self, text: str) -> bool:
        """Quickly, as it is asked of every piece."""
        return any(character in text for character in self.first_characters)


class WithoutSpecialTokens:
    """Leaves them out of what another parser reads."""

    def __init__(self, tokens: SpecialTokens, inner: AnswerParser) -> None:
        self._tokens = tokens
        self._inner = inner
        self._held = ""

    @property
    def has_called(self) -> bool:
        return self._inner.has_called

    @property
    def is_reasoning(self) -> bool:
        return self._inner.is_reasoning

    def feed(self, text: str) -> Sequence[Part]:
        if not self._held and not self._tokens.may_be_in(text):
            return self._inner.feed(text)
        kept = []
        for piece in in_pieces(text):
            self._held += piece
            found = True
            while found:
                before, mark, self._held = split_before(self._tokens.pattern, self._held)
                kept.append(before)
                found = mark is not None
        return self._inner.feed("".join(kept))

    def finish(self) -> Sequence[Part]:
        held, self._held = self._held, ""
        return [*self._inner.feed(held), *self._inner.finish()]
