"""Computes steps in torch: on any processor, and with adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trioserve.worker.attention import TorchAttention
from trioserve.worker.executor import Highest
from trioserve.worker.loader import load_model
from trioserve.worker.lora import step_adapters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.models.config import DecoderConfig
    from trioserve.models.decoder import DecoderModel
    from trioserve.worker.attention import AttentionBackend
    from trioserve.worker.batch import ScheduledSequence
    from trioserve.worker.kv_layout import KVCacheLayout
    from trioserve.worker.lora import Adapter

__all__ = ["TorchExecutor", "first_rows_of", "highest_of", "inputs_of"]


class TorchExecutor:
    """See `trioserve.worker.executor.Executor`.

    torch keeps its number of compute threads per calling thread; it is set here.

    Args:
      reason: why it is torch that computes.

    Raises:
      ModelNotSupportedError, ModelSourceError: see `trioserve.worker.loader.load_model`.
    """

    @torch.inference_mode()
    def __init__(self, model: ResolvedModel, config: EngineConfig, *, reason: str) -> None:
        self.kernels = f"torch ({reason})"
        self._source = model
        self._num_threads = config.threads
        # Invariant: None exactly between free_weights and load_weights.
        self._model: DecoderModel | None = None
        self._model = loaded = self._load()
        self.config: DecoderConfig = loaded.config
        self.dtype = model.dtype
        self._attention: AttentionBackend = TorchAttention(
            loaded.config, config.cache.block_size, loaded.dtype
        )
        self._kv_caches: list[torch.Tensor] = []
        # Invariant: one per layer after allocate_kv_cache, empty before it and after free_kv_cache.
        self._hidden = torch.empty(0)

    @property
    def layout(self) -> KVCacheLayout:
        return self._attention.layout

    @property
    def bytes_per_block(self) -> int:
        return self._attention.bytes_per_block

    def max_num_seqs(self, num_blocks: int) -> None:
        """Their blocks are all they need."""

    @torch.inference_mode()
    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._kv_caches = self._attention.allocate(num_blocks)

    def populate_kv_cache(self, first_block: int, end_block: int) -> None:
        """Left to the first use: blocks are in as many pieces as there are layers."""

    def free_kv_cache(self) -> None:
        self._kv_caches = []

    def free_weights(self) -> None:
        self._model = None

    @torch.inference_mode()
    def load_weights(self) -> None:
        if self._model is None:
            self._model = self._load()

    @torch.inference_mode()
    def forward(self, sequences: Sequence[ScheduledSequence], adapters: Mapping[str, Adapter]) -> list[int]:
        order = self._attention.arrange(sequences)
        arranged = [sequences[index] for index in order]
        self._hidden = self._loaded.forward(
            *inputs_of(arranged),
            self._attention.plan(arranged),
            self._kv_caches,
            step_adapters(arranged, adapters) if adapters else None,
        )
        return first_rows_of(order, arranged)

    def logits(self, rows: Sequence[int]) -> np.ndarray:
        logits: np.ndarray = self._compute_logits(rows).numpy()
        return logits

    @torch.inference_mode()
    def highest(self, rows: Sequence[int]) -> Highest:
        return highest_of(self._compute_logits(rows))

    def close(self) -> None:
        """There is nothing of its own that would have to end."""

    @torch.inference_mode()
    def _compute_logits(self, rows: Sequence[int]) -> torch.Tensor:
        """fp32 [R, vocab_size]."""
        return self._loaded.logits(self._hidden[list(rows)]).float()

    @property
    def _loaded(self) -> DecoderModel:
        assert self._model is not None, "the weights have been freed"
        return self._model

    def _load(self) -> DecoderModel:
        # Loading copies memory, for which one thread is enough; hundreds of small parallel copies that wait
        # for each other's threads take twenty times longer on a busy machine.
        torch.set_num_threads(1)
        model = load_model(self._source)
        torch.set_num_threads(self._num_threads)
        return model


def highest_of(logits: torch.Tensor) -> Highest:
    """logits: [R, vocab_size]."""
    highest = logits.argmax(-1, keepdim=True)  # a NaN counts as such
    is_finite = logits.gather(-1, highest)[:, 0].isfinite()
    return Highest(highest[:, 0].tolist(), is_finite.tolist())


def first_rows_of(order: Sequence[int], arranged: Sequence[ScheduledSequence]) -> list[int]:
    """The row of each sequence's first token, as `Executor.forward` returns it. `arranged` are the sequences
    as they were computed; `order` says which one each of them is."""
    first_rows = [0] * len(order)
    row = 0
    for index, sequence in zip(order, arranged, strict=True):
        first_rows[index] = row
        row += len(sequence.token_ids)
    return first_rows


def inputs_of(sequences: list[ScheduledSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of all sequences laid end to end, int64 [T] each."""
    token_ids: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        token_ids += sequence.token_ids
        positions += range(sequence.start, sequence.start + len(sequence.token_ids))
    return torch.tensor(token_ids), torch.tensor(positions)
