"""The interface of all parsers, and the one for answers that are nothing but words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trioserve.parsers.parts import TextPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.parsers.parts import Part

__all__ = ["AnswerParser", "PlainParser"]


class AnswerParser(Protocol):
    """Takes the text of one answer in pieces, split anywhere. Never waits, never raises.

    However the text is split, the parts' texts joined (neighbours of one kind, and those of one call) are the
    same.
    """

    def feed(self, text: str) -> Sequence[Part]:
        """What the next piece of the answer says, in its order. What may be the beginning of a mark is held
        back until that is known."""

    def finish(self) -> Sequence[Part]:
        """The answer has ended: what was held back. Called once, after the last `feed`."""

    @property
    def has_called(self) -> bool:
        """At least one call has begun, and all that have begun are whole."""

    @property
    def is_reasoning(self) -> bool:
        """What comes next is reasoning, as far as is known now."""


class PlainParser:
    """For answers without any marks."""

    has_called = False
    is_reasoning = False

    def feed(self, text: str) -> Sequence[Part]:
        return [TextPart(text)] if text else ()

    def finish(self) -> Sequence[Part]:
        return ()
