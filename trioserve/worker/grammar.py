"""What a grammar must offer to those who schedule and sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

__all__ = ["GrammarMatcher"]


class GrammarMatcher(Protocol):
    """The state of one sequence within its grammar. Used by one thread at a time; nothing here blocks long.

    Once `failure` is set, every other method may be called but means nothing.
    """

    @property
    def failure(self) -> str | None:
        """Why the match cannot go on (a limit on its work was reached), else None."""
        ...

    @property
    def is_complete(self) -> bool:
        """What was taken in is whole, and nothing but the end may follow."""
        ...

    def fill_mask(self, mask: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 for each token t that may come next, and clear all others.

        EOS tokens are among them where the output may end. mask: int32 [ceil(vocab_size / 32)], contiguous.
        """
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take tokens in, one after the other; EOS where the output may end is one. Sets `failure` if one
        does not fit."""
        ...

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` of `advance`."""
        ...

    def count_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of these, from the first on, could be taken in now. Changes nothing."""
        ...

    def forced_tokens(self, limit: int) -> list[int]:
        """Tokens that spell the text that must come next, if only one can; at most `limit`."""
        ...
