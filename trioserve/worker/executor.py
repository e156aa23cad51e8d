"""What a step is computed by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from trioserve.config import DType
    from trioserve.models.config import DecoderConfig
    from trioserve.worker.batch import ScheduledSequence
    from trioserve.worker.kv_layout import KVCacheLayout
    from trioserve.worker.lora import Adapter

__all__ = ["Executor", "Highest"]


@attrs.frozen(eq=False)
class Highest:
    """The highest logit of each of some rows."""

    token_ids: Sequence[int]
    """Anything where the row is not finite."""
    is_finite: Sequence[bool]
    """False also if any of the row's logits is NaN."""


class Executor(Protocol):
    """Owns a model's weights, its KV cache, and the hidden states of the last step.

    All calls block, and are to be made in the thread that made the executor.
    """

    @property
    def kernels(self) -> str:
        """What computes the model, in words: which kernels in how many threads; and if it is torch, why."""
        ...

    @property
    def config(self) -> DecoderConfig | None:
        """None: the model takes no adapters."""
        ...

    @property
    def dtype(self) -> DType:
        """The model's: of its activations, and of adapters."""
        ...

    @property
    def layout(self) -> KVCacheLayout:
        """How the layers share out the cache."""
        ...

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of `block_size` tokens in all layers of a group."""
        ...

    def max_num_seqs(self, num_blocks: int) -> int | None:
        """How many sequences may run at a time over so many blocks; None: as many as their blocks let."""
        ...

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve the cache, all zeros; memory is used as blocks are first written."""
        ...

    def populate_kv_cache(self, first_block: int, end_block: int) -> None:
        """Use memory for these blocks now. Where it cannot be done, nothing is."""
        ...

    def free_kv_cache(self) -> None:
        """No step can run until it is allocated anew."""
        ...

    def free_weights(self) -> None:
        """No step can run until they are loaded again."""
        ...

    def load_weights(self) -> None:
        """Read the same model again, after `free_weights`; else nothing is done.

        Raises:
          ModelNotSupportedError, ModelSourceError: it is not what it was.
        """
        ...

    def forward(self, sequences: Sequence[ScheduledSequence], adapters: Mapping[str, Adapter]) -> list[int]:
        """Compute the hidden state after each of the sequences' tokens, T in all, and keep them until the
        next call. adapters: by the keys that sequences name.

        Returns the row of each sequence's first token; the sequence's others follow it.
        """
        ...

    def logits(self, rows: Sequence[int]) -> np.ndarray:
        """Of R rows of the last step, from 0 to T - 1: fp32 [R, vocab_size], to be overwritten as one likes.

        It is valid until the next call.
        """
        ...

    def highest(self, rows: Sequence[int]) -> Highest:
        """What `logits` would show, without the logits."""
        ...

    def close(self) -> None:
        """End the threads, if there are any; nothing may be called afterwards, except this."""
        ...
