"""What of a request's parameters has to be tokenized before the engine core can use it."""

from __future__ import annotations

import attrs

__all__ = ["ThinkingBudget", "TokenConstraints"]


@attrs.frozen(kw_only=True)
class ThinkingBudget:
    """After the start sequence, at most `max_tokens` tokens until the end sequence; then it is forced."""

    max_tokens: int
    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class TokenConstraints:
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output; none is empty."""
    thinking: ThinkingBudget | None = None
