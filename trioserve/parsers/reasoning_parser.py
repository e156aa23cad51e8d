"""Parts an answer in what the model thinks and what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import regex

from trioserve.parsers.parts import ReasoningPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.parsers.answer_parser import AnswerParser
    from trioserve.parsers.parts import Part
    from trioserve.reasoning import ReasoningFormat

__all__ = ["ReasoningParser"]

_SPACE = r"\s{0,64}+"


class ReasoningParser:
    """Reasoning comes once, and first; all after it is for another parser. White space around the marks
    belongs to neither."""

    def __init__(self, form: ReasoningFormat, inner: AnswerParser, *, is_open: bool) -> None:
        """`is_open`: the answer is reasoning from its beginning, whether or not the start mark is there."""
        self._inner = inner
        self._is_open = is_open
        self._start = regex.compile(_SPACE + regex.escape(form.start))
        self._end = regex.compile(_SPACE + regex.escape(form.end))
        # Invariant: what is held has not been told; from _read_answer on it is empty.
        self._held = ""
        self._step: Callable[[], Sequence[Part] | None] = self._find_start
        """None: more of the answer has to come first."""
        self._has_ended = False
        self._is_at_start = True
        """Of the reasoning or of the answer behind it: white space is dropped."""

    @property
    def has_called(self) -> bool:
        return self._inner.has_called

    @property
    def is_reasoning(self) -> bool:
        return self._step == self._read_reasoning or (self._is_open and self._step == self._find_start)

    def feed(self, text: str) -> Sequence[Part]:
        if self._step == self._read_answer and not self._is_at_start:
            return self._inner.feed(text)
        self._held += text
        parts: list[Part] = []
        while self._held and (found := self._step()) is not None:
            parts += found
        return parts

    def finish(self) -> Sequence[Part]:
        self._has_ended = True
        return [*self.feed(""), *self._inner.finish()]

    def _find_start(self) -> Sequence[Part] | None:
        found = self._start.match(self._held, partial=not self._has_ended)
        if found is not None and found.partial:
            return None
        if found is not None:
            self._held = self._held[found.end() :]
        thinks = self._is_open or found is not None
        self._step = self._read_reasoning if thinks else self._read_answer
        self._is_at_start = thinks
        return ()

    def _read_reasoning(self) -> Sequence[Part] | None:
        if not self._drop_space():
            return None
        found = self._end.search(self._held, partial=not self._has_ended)
        length = len(self._held) if found is None else found.start()
        text, self._held = self._held[:length], self._held[length:]
        if found is not None and not found.partial:
            self._held = self._held[found.end() - length :]
            self._step, self._is_at_start = self._read_answer, True
        elif not text:
            return None
        return [ReasoningPart(text)] if text else ()

    def _read_answer(self) -> Sequence[Part] | None:
        if self._is_at_start and not self._drop_space():
            return None
        text, self._held = self._held, ""
        return self._inner.feed(text)

    def _drop_space(self) -> bool:
        """False: there was nothing else."""
        if self._is_at_start:
            self._held = self._held.lstrip()
            self._is_at_start = not self._held
        return bool(self._held)
