"""Logprobs as they come from the engine, and as users see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.outputs import FlatLogprobs, Logprob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import TokenLogprobs
    from trioserve.worker.batch import LogprobRow

__all__ = ["PromptLogprobs", "named_logprobs"]


def named_logprobs(
    rows: Iterable[LogprobRow], tokenizer: Tokenizer, *, flat: bool = False
) -> Sequence[TokenLogprobs]:
    """One entry per row, with the tokens' texts."""
    if flat:
        return _add_rows(FlatLogprobs(), rows, tokenizer)
    return [_named(row, tokenizer) for row in rows]


def _named(row: LogprobRow, tokenizer: Tokenizer) -> TokenLogprobs:
    named: dict[int, Logprob] = {}
    for token, logprob, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True):
        if token not in named:  # the first token is often among the most likely ones, too
            named[token] = Logprob(logprob, rank, tokenizer.token_text(token))
    return named


def _add_rows(flat: FlatLogprobs, rows: Iterable[LogprobRow], tokenizer: Tokenizer) -> FlatLogprobs:
    for row in rows:
        flat.append(row.token_ids, row.logprobs, row.ranks)
        flat.decoded_tokens.extend(map(tokenizer.token_text, row.token_ids))
    return flat


class PromptLogprobs:
    """A prompt's logprobs while they come, in as many parts as the prompt has steps.

    They are shown once all are there, as whole results are: with every output, or with one (`shown_once`).
    """

    def __init__(self, prompt_length: int, tokenizer: Tokenizer, *, flat: bool, shown_once: bool) -> None:
        self._num_missing = prompt_length - 1  # nothing comes before the first token, so it has no logprob
        self._tokenizer = tokenizer
        self._flat = flat
        self._shown_once = shown_once
        self._rows: list[LogprobRow] = []
        self._named: Sequence[TokenLogprobs | None] | None = None
        self._was_taken = False

    def push(self, rows: Sequence[LogprobRow]) -> None:
        self._rows += rows
        self._num_missing -= len(rows)

    def take(self) -> Sequence[TokenLogprobs | None] | None:
        """For the next output. None: they are not all there yet, or were shown."""
        if self._num_missing > 0 or (self._shown_once and self._was_taken):
            return None
        if self._named is None:
            self._named, self._rows = self._name(), []
        self._was_taken = True
        return self._named

    def _name(self) -> Sequence[TokenLogprobs | None]:
        if self._flat:
            flat = FlatLogprobs()
            flat.append((), (), ())
            return _add_rows(flat, self._rows, self._tokenizer)
        return [None, *(_named(row, self._tokenizer) for row in self._rows)]
