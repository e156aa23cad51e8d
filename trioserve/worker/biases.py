"""What a request wishes of single tokens: stop tokens that must not come yet, and `logit_bias`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.worker.rows import Row

__all__ = ["apply_logit_bias", "early_stop_tokens"]


def early_stop_tokens(row: Row, vocab_size: int) -> list[int]:
    """Its stop tokens, as long as min_tokens are not there."""
    if row.position >= row.params.min_tokens:
        return []
    return [token for token in row.sequence.stop_token_ids if token < vocab_size]


def apply_logit_bias(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """In place, logits: fp32 [R, vocab]. Token ids beyond the vocabulary have no logit and are left out."""
    places: list[int] = []
    token_ids: list[int] = []
    biases: list[float] = []
    for index, row in enumerate(rows):
        for token, bias in (row.params.logit_bias or {}).items():
            if token < logits.shape[1]:
                places.append(index)
                token_ids.append(token)
                biases.append(bias)
    if places:
        logits[torch.tensor(places), torch.tensor(token_ids)] += torch.tensor(biases)
