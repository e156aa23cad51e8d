"""What a request wishes of single tokens: stop tokens that must not come yet, and `logit_bias`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.worker.rows import Row

__all__ = ["apply_logit_bias", "early_stop_tokens"]

_HIGHEST = 1e38
"""A bias beyond it acts like it: infinite logits have no differences."""


def early_stop_tokens(row: Row, vocab_size: int) -> list[int]:
    """Its stop tokens, as long as min_tokens are not there."""
    if row.position >= row.params.min_tokens:
        return []
    return [token for token in row.sequence.stop_token_ids if token < vocab_size]


def apply_logit_bias(logits: np.ndarray, rows: Sequence[Row]) -> None:
    """In place, logits: fp32 [R, vocab]. Token ids beyond the vocabulary have no logit and are left out."""
    for logit_row, row in zip(logits, rows, strict=True):
        biases = {t: bias for t, bias in (row.params.logit_bias or {}).items() if t < len(logit_row)}
        if biases:
            logit_row[list(biases)] += np.clip(list(biases.values()), -_HIGHEST, _HIGHEST).astype(np.float32)
