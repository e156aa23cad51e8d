"""How likely the model found the tokens of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.worker.logprobs import Wanted, log_softmax, logprob_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from trioserve.worker.batch import LogprobRow, ScheduledSequence

__all__ = ["prompt_logprobs"]

_MAX_ROWS = 64
"""Rows of logits that exist at a time: 12 MiB of fp32 for 49,152 tokens."""


def prompt_logprobs(
    sequences: Sequence[ScheduledSequence],
    first_rows: Sequence[int],
    compute_logits: Callable[[Sequence[int]], np.ndarray],
) -> list[list[LogprobRow]]:
    """What this step tells of each sequence's prompt, from its `prompt_logprobs_start` on.

    sequences: N; first_rows: N, the row of each one's first token; compute_logits: fp32 [R, vocab] of R rows.
    """
    found: list[list[LogprobRow]] = [[] for _ in sequences]
    wanted = [
        (index, first_rows[index] + position - 1 - sequence.start, sequence.prompt_token_ids[position])
        for index, sequence in enumerate(sequences)
        for position in _wanted_positions(sequence)
    ]
    for start in range(0, len(wanted), _MAX_ROWS):
        indices, rows, token_ids = zip(*wanted[start : start + _MAX_ROWS], strict=True)
        values = log_softmax(compute_logits(rows))
        asked = [Wanted(sequences[index].params.prompt_logprobs or 0) for index in indices]
        for index, row in zip(indices, logprob_rows(values, token_ids, asked), strict=True):
            found[index].append(row)
    return found


def _wanted_positions(sequence: ScheduledSequence) -> range:
    """Each is told by the token before it."""
    start, end = sequence.start, sequence.start + len(sequence.token_ids)
    first = max(start + 1, sequence.prompt_logprobs_start)
    return range(first, min(end + 1, len(sequence.prompt_token_ids)))
