"""What is known of a model's way of writing answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.parsers.call_format import CallFormat
from trioserve.parsers.call_formats import CALL_FORMATS, find_call_format
from trioserve.parsers.special_tokens import SpecialTokens
from trioserve.reasoning import ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["ModelParsers"]


@attrs.frozen(kw_only=True, eq=False)
class ModelParsers:
    """Made once for a model."""

    calls: CallFormat | None = None
    """How it writes calls of tools; None: it is not known."""
    reasoning: ReasoningFormat | None = None
    """How it thinks; None: it does not, as far as is known."""
    _special_tokens: frozenset[str] = frozenset()
    _hidden: SpecialTokens = attrs.field(init=False)
    """All that are no marks."""
    _hidden_without_calls: SpecialTokens = attrs.field(init=False)
    """The same where no calls are looked for."""

    @_hidden.default
    def _find_hidden(self) -> SpecialTokens:
        return SpecialTokens(self._special_tokens - self._marks(reads_calls=True))

    @_hidden_without_calls.default
    def _find_hidden_without_calls(self) -> SpecialTokens:
        return SpecialTokens(self._special_tokens - self._marks(reads_calls=False))

    @classmethod
    def find(
        cls,
        call_parser: str,
        *,
        reasoning: ReasoningFormat | None,
        chat_template: str | None,
        special_tokens: Collection[str],
    ) -> ModelParsers:
        """`call_parser`: a name of `CALL_FORMATS`, "auto" (what the chat template teaches) or "none".
        `special_tokens`: those that texts do not have unless they are asked for."""
        if call_parser == "auto":
            calls = find_call_format(chat_template or "")
        else:
            calls = CALL_FORMATS.get(call_parser)
        return cls(calls=calls, reasoning=reasoning, special_tokens=frozenset(special_tokens))

    def _marks(self, *, reads_calls: bool) -> frozenset[str]:
        calls = self.calls.marks if self.calls is not None and reads_calls else ()
        reasoning = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
        return frozenset((*calls, *reasoning))

    def hidden_tokens(self, *, reads_calls: bool) -> SpecialTokens | None:
        """If the marks are special tokens, an answer has to come with these; then the others are to be left
        out of it. None: it comes without."""
        if self._special_tokens.isdisjoint(self._marks(reads_calls=reads_calls)):
            return None
        return self._hidden if reads_calls else self._hidden_without_calls
