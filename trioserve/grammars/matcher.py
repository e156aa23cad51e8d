"""One sequence's way through a grammar."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from trioserve.grammars.refusals import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import LLMatcher

__all__ = ["Matcher"]


class Matcher:
    """A `trioserve.worker.grammar.GrammarMatcher`.

    Its copies share the automaton of the lexer, which grows as they meet new texts: `on_spoiled` is called
    when it has reached a limit, because from then on none of them can go on.
    """

    def __init__(
        self,
        inner: LLMatcher,
        *,
        eos_token_ids: frozenset[int],
        tokenizer_size: int,
        vocab_size: int,
        on_spoiled: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._on_spoiled = on_spoiled
        # llguidance writes a bit for each token it knows, no more and no less.
        self._row = np.empty(-(-tokenizer_size // 32), dtype=np.int32)
        # EOS tokens after the match had ended by itself: llguidance lets them pass and does not count them.
        self._num_after_end = 0

    @property
    def failure(self) -> str | None:
        if not self._inner.is_error():
            return None
        reason = self._inner.get_error()
        if reason.startswith("lexer error"):
            self._on_spoiled()
        return shortened(reason)

    @property
    def is_complete(self) -> bool:
        return self._inner.is_stopped() and not self._inner.is_error()

    def fill_mask(self, mask: np.ndarray) -> None:
        self._inner.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        shared = min(len(mask), len(self._row))
        mask[:shared] = self._row[:shared]
        mask[shared:] = 0
        if rest := self._vocab_size % 32:
            mask[self._vocab_size // 32] &= np.int32((1 << rest) - 1)

    def advance(self, token_ids: Sequence[int]) -> None:
        for position, token in enumerate(token_ids):
            if self._inner.is_stopped() and token in self._eos_token_ids:
                self._num_after_end += 1
            elif not self._inner.consume_token(token):
                assert self._inner.is_error(), position
                return

    def roll_back(self, num_tokens: int) -> None:
        uncounted = min(num_tokens, self._num_after_end)
        self._num_after_end -= uncounted
        if num_tokens > uncounted:
            self._inner.rollback(num_tokens - uncounted)

    def count_fitting(self, token_ids: Sequence[int]) -> int:
        if self._inner.is_stopped():
            return len(list(takewhile(self._eos_token_ids.__contains__, token_ids)))
        return self._inner.validate_tokens(list(token_ids))

    def forced_tokens(self, limit: int) -> list[int]:
        return self._inner.compute_ff_tokens()[:limit]
