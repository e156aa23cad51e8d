"""Logits moved for tokens named in the request: stop tokens that come too early, and `logit_bias`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.worker.batch import ScheduledSequence

__all__ = ["apply_biases", "must_not_stop"]


def must_not_stop(sequence: ScheduledSequence) -> bool:
    """Are its stop tokens barred from the next position?"""
    return bool(sequence.stop_token_ids) and len(sequence.output_token_ids) < sequence.params.min_tokens


def apply_biases(logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> None:
    """Bar stop tokens until min_tokens are there, then add `logit_bias`; in place, logits: fp32 [R, vocab].

    Token ids beyond the vocabulary have no logit and are left out.
    """
    rows: list[int] = []
    token_ids: list[int] = []
    biases: list[float] = []
    for row, sequence in enumerate(sequences):
        barred = sequence.stop_token_ids if must_not_stop(sequence) else frozenset()
        added = dict(sequence.params.logit_bias or {}) | dict.fromkeys(barred, -torch.inf)
        inside = {token: bias for token, bias in added.items() if token < logits.shape[1]}
        rows += [row] * len(inside)
        token_ids += inside.keys()
        biases += inside.values()
    if rows:
        logits[torch.tensor(rows), torch.tensor(token_ids)] += torch.tensor(biases)
