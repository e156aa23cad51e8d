"""How many tokens a model has spent on thinking."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trioserve.reasoning import ReasoningFormat

__all__ = ["ReasoningTokens"]


class ReasoningTokens:
    """Counts up to the token with which the end mark ends, that and the start mark included. By the bytes of
    single tokens: it does not matter how many of them come at a time."""

    def __init__(self, form: ReasoningFormat, token_bytes: Callable[[int], bytes], *, is_open: bool) -> None:
        self._start, self._end = form.start.encode(), form.end.encode()
        self._token_bytes = token_bytes
        self._is_open = is_open
        self._has_ended = False
        self._tail = b""
        self._num_tokens = 0

    @property
    def count(self) -> int:
        return self._num_tokens if self._is_open else 0

    def add(self, token_ids: Iterable[int]) -> None:
        if self._has_ended:
            return
        for token_id in token_ids:
            self._num_tokens += 1
            self._tail += self._token_bytes(token_id)
            if not self._is_open:
                self._look_for_start()
            if self._is_open and self._end in self._tail:
                self._has_ended = True
            if self._has_ended:
                return
            if self._is_open:
                self._tail = self._tail[-len(self._end) :]

    def _look_for_start(self) -> None:
        begin = self._tail.lstrip()
        self._is_open = begin.startswith(self._start)
        self._has_ended = not self._is_open and not self._start.startswith(begin)
