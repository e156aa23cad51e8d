"""What turns whole texts into hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

if TYPE_CHECKING:
    from trioserve.worker.pooling_batch import PoolingSequence

__all__ = ["PackedTexts", "TextEncoder", "pack_texts"]


@attrs.frozen(kw_only=True, eq=False)
class PackedTexts:
    """Texts laid end to end, T tokens together, without padding."""

    token_ids: np.ndarray
    """int64 [T]; likewise the next two."""
    positions: np.ndarray
    """Of each token in its text, from 0."""
    type_ids: np.ndarray
    lengths: Sequence[int]
    """In tokens, each at least 1."""

    @property
    def starts(self) -> np.ndarray:
        """int64: the row of each text's first token, and the end of the last one."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


def pack_texts(batch: Sequence[PoolingSequence]) -> PackedTexts:
    """At least one text, none of them empty."""
    lengths = [len(text.token_ids) for text in batch]
    total = sum(lengths)
    token_ids = np.empty(total, np.int64)
    type_ids = np.zeros(total, np.int64)
    positions = np.empty(total, np.int64)
    start = 0
    for text, length in zip(batch, lengths, strict=True):
        end = start + length
        token_ids[start:end] = text.token_ids
        positions[start:end] = np.arange(length)
        if text.token_type_ids is not None:
            type_ids[start:end] = text.token_type_ids
        start = end
    return PackedTexts(token_ids=token_ids, positions=positions, type_ids=type_ids, lengths=lengths)


class TextEncoder(Protocol):
    """Owns a model's weights.

    All calls block, and are to be made in the thread that made the encoder.
    """

    @property
    def kernels(self) -> str:
        """What computes, in words; and if it is torch, why."""
        ...

    def encode(self, texts: PackedTexts) -> np.ndarray:
        """The hidden state of each token: float32 [T, hidden_size], valid until the next call."""
        ...

    def free_weights(self) -> None:
        """Nothing can be encoded until they are loaded again."""
        ...

    def load_weights(self) -> None:
        """Read the same model again, after `free_weights`; else nothing is done.

        Raises:
          ModelNotSupportedError, ModelSourceError: it is not what it was.
        """
        ...

    def close(self) -> None:
        """End the threads, if there are any; nothing may be called afterwards, except this."""
        ...
