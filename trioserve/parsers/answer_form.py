"""What a request makes of its answer's form, and so how the answer is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.parsers.answer_parser import PlainParser
from trioserve.parsers.call_format import CallFormat
from trioserve.parsers.call_parser import CallParser
from trioserve.parsers.forced_calls import CallScanner
from trioserve.parsers.reasoning_parser import ReasoningParser
from trioserve.parsers.reasoning_tokens import ReasoningTokens
from trioserve.parsers.special_tokens import SpecialTokens, WithoutSpecialTokens
from trioserve.reasoning import ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioserve.parsers.answer_parser import AnswerParser

__all__ = ["AnswerForm", "ReasoningForm"]


@attrs.frozen(kw_only=True)
class ReasoningForm:
    """How a turn may begin."""

    marks: ReasoningFormat
    is_open: bool
    """The answer is reasoning from its beginning."""
    is_closed: bool
    """There will be none."""


@attrs.frozen(kw_only=True)
class AnswerForm:
    """Makes a parser for each answer of a request."""

    must_call: bool = False
    """It is tool calls and nothing else, held to that by a grammar; after the reasoning, if there is any."""
    named_function: str | None = None
    """With `must_call`: it is the arguments of this function alone."""
    calls: CallFormat | None = None
    """How calls are written that the model may make; None: it makes none."""
    functions: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """Those it may call: name -> JSON schema of the arguments."""
    reasoning: ReasoningForm | None = None
    """None: the model does not think."""
    hidden: SpecialTokens | None = None
    """Special tokens that come with the text, and mean nothing; None: there are none."""

    def new_parser(self) -> AnswerParser:
        parser = self._answer_parser()
        if self.reasoning is not None:
            parser = ReasoningParser(self.reasoning.marks, parser, is_open=self.reasoning.is_open)
        return parser if self.hidden is None else WithoutSpecialTokens(self.hidden, parser)

    def _answer_parser(self) -> AnswerParser:
        if self.must_call:
            return CallScanner(self.named_function)
        return PlainParser() if self.calls is None else CallParser(self.calls, self.functions)

    def new_token_counter(self, token_bytes: Callable[[int], bytes]) -> ReasoningTokens | None:
        """Of the reasoning; None where there is none."""
        if self.reasoning is None:
            return None
        return ReasoningTokens(self.reasoning.marks, token_bytes, is_open=self.reasoning.is_open)
