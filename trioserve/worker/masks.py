"""Which tokens a row may draw at all: grammar masks, and what else bars tokens.

The constraints of a request may contradict each other. From the strongest to the weakest they are: the
grammar, `allowed_token_ids`, `bad_words`, `min_tokens`. Each one acts only on rows in which it leaves
something of what the stronger ones left; otherwise it does nothing there. So no row loses all its tokens, and
a grammar's mask is never violated.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from trioserve.worker.rows import drafts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trioserve.worker.batch import ScheduledSequence
    from trioserve.worker.grammar import GrammarMatcher
    from trioserve.worker.rows import Row

__all__ = ["GrammarMasks", "Masks", "allowed_tokens", "bar", "keep_only"]

Masks = dict[int, np.ndarray]
"""By index of the sequence: bool [N, vocab], True for what may come in its first N rows. Fewer than
1 + num_drafts if the match is complete after some draft: drawing token by token would end there, too."""


class GrammarMasks:
    """Fills masks in a thread of its own, while the caller's thread runs the model.

    The thread starts with the first grammar; `close` ends it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, sequences: Sequence[ScheduledSequence]) -> Callable[[], Masks]:
        """Start filling; the result is a call that waits for the masks.

        Until it has returned, the sequences' grammars belong to the thread. Those that have failed have no
        masks.
        """
        wanted = {
            index: (sequence.grammar, drafts_of(sequence))
            for index, sequence in enumerate(sequences)
            if sequence.grammar is not None
        }
        if not wanted:
            return dict
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar masks")
        return self._pool.submit(self._fill_all, wanted).result

    def close(self) -> None:
        """Waits for the masks that are being filled."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _fill_all(self, wanted: Mapping[int, tuple[GrammarMatcher, Sequence[int]]]) -> Masks:
        filled = {index: self._fill(*grammar_and_drafts) for index, grammar_and_drafts in wanted.items()}
        return {index: mask for index, mask in filled.items() if mask is not None}

    def _fill(self, grammar: GrammarMatcher, drafts: Sequence[int]) -> np.ndarray | None:
        bits = np.zeros((1 + len(drafts), -(-self._vocab_size // 32)), np.int32)
        grammar.fill_mask(bits[0])
        num_taken = 0
        for draft in drafts:
            grammar.advance([draft])
            num_taken += 1
            if grammar.is_complete:
                break
            grammar.fill_mask(bits[num_taken])
        grammar.roll_back(num_taken)
        if grammar.failure is not None:
            return None
        unpacked = np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        num_usable = np.logical_and.accumulate(unpacked.any(axis=1)).sum()
        return unpacked[:num_usable].view(bool)


def allowed_tokens(grammar_mask: np.ndarray | None, row: Row) -> np.ndarray | None:
    """What grammar and `allowed_token_ids` leave, bool [vocab]; None: everything. Not to be changed."""
    listed = row.history.allowed
    if grammar_mask is None or listed is None:
        return listed if grammar_mask is None else grammar_mask
    both = grammar_mask & listed
    return both if both.any() else grammar_mask


def keep_only(logits: np.ndarray, allowed: Mapping[int, np.ndarray]) -> None:
    """Bar all but the allowed tokens (bool [vocab], by row); in place, logits: fp32 [R, vocab]."""
    for index, mask in allowed.items():
        np.copyto(logits[index], -np.inf, where=~mask)


def bar(logits: np.ndarray, barred: Mapping[int, Sequence[int]]) -> None:
    """Bar tokens of the vocabulary, by row, where that leaves others; in place, logits: fp32 [R, vocab]."""
    for index, token_ids in barred.items():
        if not token_ids:
            continue
        row = logits[index]
        before = row[token_ids]
        row[token_ids] = -np.inf
        if np.isneginf(row.max()):
            row[token_ids] = before
