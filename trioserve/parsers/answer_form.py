"""What a request makes of its answer's form, and so how the answer is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.parsers.answer_parser import PlainParser
from trioserve.parsers.forced_calls import CallScanner

if TYPE_CHECKING:
    from trioserve.parsers.answer_parser import AnswerParser

__all__ = ["AnswerForm"]


@attrs.frozen(kw_only=True)
class AnswerForm:
    """Makes a parser for each answer of a request."""

    must_call: bool = False
    """It is tool calls and nothing else, held to that by a grammar."""
    named_function: str | None = None
    """With `must_call`: it is the arguments of this function alone."""

    def new_parser(self) -> AnswerParser:
        if self.must_call:
            return CallScanner(self.named_function)
        return PlainParser()
