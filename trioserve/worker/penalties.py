"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.sampling_params import SamplingParams
    from trioserve.worker.rows import Row

__all__ = ["TokenCounts", "apply_penalties"]


class TokenCounts:
    """The tokens that a growing history contains, and how often its output does; a new token costs O(1).

    token_ids: the prompt's; they count as seen 0 times.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        seen = np.unique(np.asarray(token_ids, np.int64))
        self._places = {token: place for place, token in enumerate(seen.tolist())}
        # Invariant: the first len(_places) entries of both belong to the tokens of _places, in its order.
        self._token_ids = seen
        self._counts = np.zeros(len(seen), np.float32)

    def extend(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self._add(token)

    def _add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._token_ids):
            self._grow()
        self._token_ids[place] = token
        self._counts[place] += 1

    def _grow(self) -> None:
        # In proportion, so that adding n tokens copies O(n).
        more = 64 + len(self._token_ids) // 2
        self._token_ids = np.concatenate((self._token_ids, np.zeros(more, np.int64)))
        self._counts = np.concatenate((self._counts, np.zeros(more, np.float32)))

    def with_drafts(self, drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens, int64 [N], and their counts, fp32 [N], as if the drafts were output too."""
        size = len(self._places)
        token_ids, counts = self._token_ids[:size], self._counts[:size]
        if not drafts:
            return token_ids, counts
        new = [token for token in dict.fromkeys(drafts) if token not in self._places]
        token_ids = np.concatenate((token_ids, np.array(new, np.int64)))
        counts = np.concatenate((counts, np.zeros(len(new), np.float32)))
        for token in drafts:
            counts[self._places[token] if token in self._places else size + new.index(token)] += 1
        return token_ids, counts


def apply_penalties(logits: np.ndarray, rows: Sequence[Row]) -> None:
    """Change in place the logits of tokens that a row's history holds already; logits: fp32 [R, vocab].

    Of a token with logit x that occurs in prompt or output:  x / repetition if x > 0, else x * repetition.
    Then, if it occurs n > 0 times in the output:             x - frequency * n - presence.
    """
    for logit_row, row in zip(logits, rows, strict=True):
        if row.history.counts is not None:
            _penalize(logit_row, row.params, *row.history.counts.with_drafts(row.drafts))


def _penalize(logits: np.ndarray, params: SamplingParams, token_ids: np.ndarray, counts: np.ndarray) -> None:
    """logits: fp32 [vocab]; token_ids: int64 [N], distinct; counts: fp32 [N], in the output."""
    old = logits[token_ids]
    repetition = np.float32(params.repetition_penalty)
    with np.errstate(over="ignore"):  # of logits near the largest number there is
        changed = np.where(old > 0, old / repetition, old * repetition)
    subtracted = np.float32(params.frequency_penalty) * counts
    subtracted += np.float32(params.presence_penalty) * (counts > 0)
    logits[token_ids] = changed - subtracted
