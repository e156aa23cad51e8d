"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.worker.batch import ScheduledSequence

__all__ = ["apply_penalties"]


def apply_penalties(logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> None:
    """Change in place the logits of tokens that a row's sequence holds already; logits: fp32 [R, vocab].

    Of a token with logit x that occurs in prompt or output:  x / repetition if x > 0, else x * repetition.
    Then, if it occurs n > 0 times in the output:             x - frequency * n - presence.
    """
    repeated = [row for row, s in enumerate(sequences) if s.params.repetition_penalty != 1.0]
    if repeated:
        _apply_repetition(logits, sequences, repeated)
    counted = [
        row
        for row, s in enumerate(sequences)
        if s.output_token_ids and (s.params.frequency_penalty or s.params.presence_penalty)
    ]
    if counted:
        _apply_frequency_and_presence(logits, sequences, counted)


def _apply_repetition(
    logits: torch.Tensor, sequences: Sequence[ScheduledSequence], rows: Sequence[int]
) -> None:
    tokens = ((row, part) for row in rows for part in _prompt_and_output(sequences[row]))
    places, _ = _occurrences(tokens, logits.shape[1])
    penalty = torch.tensor([s.params.repetition_penalty for s in sequences])[places // logits.shape[1]]
    flat = logits.view(-1)
    old = flat[places]
    flat[places] = torch.where(old > 0, old / penalty, old * penalty)


def _apply_frequency_and_presence(
    logits: torch.Tensor, sequences: Sequence[ScheduledSequence], rows: Sequence[int]
) -> None:
    tokens = ((row, sequences[row].output_token_ids) for row in rows)
    places, counts = _occurrences(tokens, logits.shape[1])
    row_of = places // logits.shape[1]
    frequency = torch.tensor([s.params.frequency_penalty for s in sequences])[row_of]
    presence = torch.tensor([s.params.presence_penalty for s in sequences])[row_of]
    logits.view(-1)[places] -= frequency * counts + presence


def _prompt_and_output(sequence: ScheduledSequence) -> tuple[Sequence[int], Sequence[int]]:
    return sequence.prompt_token_ids, sequence.output_token_ids


def _occurrences(
    tokens: Iterable[tuple[int, Sequence[int]]], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each (row, token) that occurs, as row * vocab_size + token, and how often; int64 and fp32, [N] each."""
    places = [row * vocab_size + np.asarray(ids, np.int64) for row, ids in tokens]
    unique, counts = np.unique(np.concatenate(places), return_counts=True)
    return torch.from_numpy(unique), torch.from_numpy(counts).float()
