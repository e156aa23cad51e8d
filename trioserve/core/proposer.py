"""Which tokens a step checks beyond those that are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.core.drafting import make_drafter

if TYPE_CHECKING:
    from trioserve.config import SpeculativeConfig
    from trioserve.core.drafting import Drafter
    from trioserve.core.request import Request

__all__ = ["Proposer"]

_MAX_FORCED = 16
"""Tokens of one jump. They are as good as certain, so only the length of a step limits them."""


class Proposer:
    """Drafts for a sequence that is about to draw a token: what its grammar forces, else what its drafter
    guesses, as far as the grammar lets it pass."""

    def __init__(self, speculative: SpeculativeConfig | None = None, *, jump_ahead: bool = False) -> None:
        self._speculative = speculative
        self._jump_ahead = jump_ahead

    def begin(self, request: Request) -> Drafter | None:
        """A new request's drafter."""
        if self._speculative is None:
            return None
        return make_drafter(self._speculative, request.prompt_token_ids)

    def propose(self, request: Request, limit: int) -> list[int]:
        """At most `limit` tokens, limit > 0."""
        grammar = request.grammar
        if grammar is None:
            return self._guess(request, limit)
        forced = grammar.forced_tokens(min(limit, _MAX_FORCED)) if self._jump_ahead else []
        # Another check, as text that is forced may be spelled in several ways, and none of them is exempt.
        drafts = forced or self._guess(request, limit)
        return drafts[: grammar.count_fitting(drafts)] if drafts else []

    def _guess(self, request: Request, limit: int) -> list[int]:
        if request.drafter is None or self._speculative is None:
            return []
        return request.drafter.propose(min(limit, self._speculative.num_speculative_tokens))
