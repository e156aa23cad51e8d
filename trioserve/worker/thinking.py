"""The thinking budget: a section that has spent it is made to end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from trioserve.token_constraints import ThinkingBudget
    from trioserve.worker.rows import Row

__all__ = ["ThinkingWatch", "apply_thinking_budgets"]


def apply_thinking_budgets(
    logits: np.ndarray, rows: Sequence[Row], grammar_masks: Mapping[int, np.ndarray]
) -> None:
    """Leave only the forced token where one is; in place, logits: fp32 [R, vocab].

    Only a grammar (bool [vocab], by row) is stronger: what it bars is not forced.
    """
    for index, row in enumerate(rows):
        watch, mask = row.history.thinking, grammar_masks.get(index)
        token = watch.forced_token(row.drafts) if watch is not None else None
        if token is not None and token < logits.shape[1] and (mask is None or mask[token]):
            logits[index] = -math.inf
            logits[index, token] = 0.0


class _Place(NamedTuple):
    """Where a history stands."""

    inside: bool
    """Of a thinking section."""
    matched: int
    """The last tokens are this many first ones of the sequence that is waited for: of the end if `inside`,
    of the start otherwise. Never all of them."""
    spent: int
    """Tokens since the section began."""


class ThinkingWatch:
    """Reads one sequence's history token by token, in constant time and memory each.

    A section begins after the start sequence and ends with the end sequence; a start inside a section is
    a token like any other. Each section has the whole budget.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._max_tokens = budget.max_tokens
        self._end = budget.end_token_ids
        self._start_pattern = _Pattern(budget.start_token_ids)
        self._end_pattern = _Pattern(budget.end_token_ids)
        self._place = _Place(inside=False, matched=0, spent=0)

    def extend(self, token_ids: Iterable[int]) -> None:
        self._place = self._follow(self._place, token_ids)

    def forced_token(self, drafts: Sequence[int]) -> int | None:
        """The one token that may come after these drafts, or None if the budget forces none.

        If the end sequence has begun by itself, it is completed from there.
        """
        place = self._follow(self._place, drafts)
        if not place.inside or place.spent < self._max_tokens:
            return None
        return self._end[place.matched]

    def _follow(self, place: _Place, token_ids: Iterable[int]) -> _Place:
        inside, matched, spent = place
        for token in token_ids:
            pattern = self._end_pattern if inside else self._start_pattern
            matched = pattern.advance(matched, token)
            spent += 1
            if matched == len(pattern):
                inside, matched, spent = not inside, 0, 0
        return _Place(inside, matched, spent)


class _Pattern:
    """Knuth, Morris and Pratt: finds a sequence in a stream, and never looks back."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        # Of the first i + 1 tokens: the longest proper beginning that is also their end.
        self._borders = [0]
        for token in token_ids[1:]:
            self._borders.append(self.advance(self._borders[-1], token))

    def __len__(self) -> int:
        return len(self._token_ids)

    def advance(self, matched: int, token: int) -> int:
        """How many first tokens the stream ends with, after one more; `matched` (not all) before it."""
        while matched and self._token_ids[matched] != token:
            matched = self._borders[matched - 1]
        return matched + 1 if self._token_ids[matched] == token else 0
