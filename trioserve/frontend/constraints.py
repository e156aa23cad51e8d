"""What the engine core must know as token ids, and a request says in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.errors import InvalidRequestError
from trioserve.token_constraints import ThinkingBudget, TokenConstraints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.reasoning import ReasoningFormat
    from trioserve.sampling_params import SamplingParams

__all__ = ["ConstraintsMaker"]

_NONE = TokenConstraints()


class ConstraintsMaker:
    """Tokenizes bad words, and knows between which tokens the model thinks."""

    def __init__(self, tokenizer: Tokenizer, reasoning: ReasoningFormat | None) -> None:
        self._tokenizer = tokenizer
        self._thinking = (
            None if reasoning is None else (self._encode(reasoning.start), self._encode(reasoning.end))
        )

    def make(self, params: SamplingParams) -> TokenConstraints:
        """Blocking: some 20 us per bad word.

        Raises:
          InvalidRequestError: a thinking_token_budget, and no knowledge of how the model thinks.
        """
        if not params.bad_words and params.thinking_token_budget is None:
            return _NONE
        return TokenConstraints(
            bad_words=tuple(dict.fromkeys(self._spellings(params.bad_words))),
            thinking=self._thinking_budget(params.thinking_token_budget),
        )

    def _spellings(self, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """At the beginning of a text a word has no space before it, elsewhere it has, and to most tokenizers
        that is another token. (vLLM bars the second spelling only if it has as many tokens as the first,
        which lets many words through.)"""
        for word in words:
            bare = word.lstrip()
            for text in (bare, f" {bare}") if bare else (word,):
                if token_ids := self._encode(text):
                    yield token_ids

    def _thinking_budget(self, max_tokens: int | None) -> ThinkingBudget | None:
        if max_tokens is None:
            return None
        if self._thinking is None:
            raise InvalidRequestError(
                "thinking_token_budget must be null: how this model thinks is not known (--reasoning-parser, "
                "--reasoning-config).",
                parameter="thinking_token_budget",
            )
        start, end = self._thinking
        return ThinkingBudget(max_tokens=max_tokens, start_token_ids=start, end_token_ids=end)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
