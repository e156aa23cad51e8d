"""Guessing what a sequence will say, from what it has said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Drafter"]


class Drafter(Protocol):
    """Of one sequence. It guesses definite tokens, not a distribution: they are checked by drawing as if
    there were no drafts, and comparing (see `trioserve.worker.sampler`)."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """These tokens are now known to follow what was known before."""
        ...

    def propose(self, limit: int) -> list[int]:
        """The tokens most likely to come next, at most `limit`; none if there is no good guess."""
        ...
