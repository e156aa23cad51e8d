"""Token sequences that the output must not contain."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.worker.rows import Row

__all__ = ["BadWords"]


class BadWords:
    """Of one request: which tokens would complete one of its bad words.

    A word of one token is always barred, a longer one's last token where the output ends with all the others.
    Words are filed under their last token but one, so that a step looks at few of them.
    """

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int) -> None:
        self._single: list[int] = []
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        for *beginning, last in words:
            if last >= vocab_size:
                continue
            if beginning:
                self._longer.setdefault(beginning[-1], []).append((beginning, last))
            else:
                self._single.append(last)

    def completing(self, row: Row) -> list[int]:
        """The tokens barred from this row; one may occur twice."""
        barred = list(self._single)
        for newest in row.last_tokens(1):
            for beginning, last in self._longer.get(newest, ()):
                if row.last_tokens(len(beginning)) == beginning:
                    barred.append(last)
        return barred
