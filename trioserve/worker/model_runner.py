"""Loads a model and runs its steps, in one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trioserve.worker.attention import TorchAttention
from trioserve.worker.loader import load_model
from trioserve.worker.sampler import sample

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.worker.attention import AttentionBackend
    from trioserve.worker.batch import SampledToken, ScheduledSequence, StepBatch

__all__ = ["ModelRunner"]


class ModelRunner:
    """Owns the weights and the KV cache.

    Everything, the constructor too, is to be called in one and the same thread: torch keeps its number of
    compute threads per calling thread. All calls block.

    Args:
      model: what to load.
      config: of it, `threads` and the block size.

    Raises:
      ModelNotSupportedError, ModelSourceError: see `trioserve.worker.loader.load_model`.
    """

    def __init__(self, model: ResolvedModel, config: EngineConfig) -> None:
        # Loading copies memory, for which one thread is enough; hundreds of small parallel copies that wait
        # for each other's threads take twenty times longer on a busy machine.
        torch.set_num_threads(1)
        with torch.inference_mode():
            self._model = load_model(model)
        torch.set_num_threads(config.threads)
        self._attention: AttentionBackend = TorchAttention(
            self._model.config, config.cache.block_size, self._model.dtype
        )
        self._kv_caches: list[torch.Tensor] = []
        # Invariant: empty before allocate_kv_cache, one per layer after it.

    @property
    def bytes_per_block(self) -> int:
        return self._attention.bytes_per_block

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve the cache, all zeros; memory is used as blocks are first written."""
        with torch.inference_mode():
            self._kv_caches = self._attention.allocate(num_blocks)

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        """Compute one step and draw a token for each sequence that samples, in the batch's order."""
        with torch.inference_mode():
            sampling = [s for s in batch.sequences if s.samples]
            hidden = self._run_model(batch)
            if not sampling:
                return []
            return sample(self._model.logits(hidden), sampling)

    def _run_model(self, batch: StepBatch) -> torch.Tensor:
        """The hidden states that sampling sequences sample from, in the batch's order."""
        order = self._attention.arrange(batch.sequences)
        arranged = [batch.sequences[index] for index in order]
        hidden = self._model.forward(*_inputs(arranged), self._attention.plan(arranged), self._kv_caches)
        return hidden[_sampled_rows(order, arranged)]


def _inputs(sequences: list[ScheduledSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of all sequences laid end to end, int64 [T] each."""
    token_ids: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        token_ids += sequence.token_ids
        positions += range(sequence.start, sequence.start + len(sequence.token_ids))
    return torch.tensor(token_ids), torch.tensor(positions)


def _sampled_rows(order: list[int], arranged: list[ScheduledSequence]) -> torch.Tensor:
    """The row of each sampling sequence's last token, in the batch's order rather than the arranged one."""
    last_rows: dict[int, int] = {}
    end = 0
    for index, sequence in zip(order, arranged, strict=True):
        end += len(sequence.token_ids)
        if sequence.samples:
            last_rows[index] = end - 1
    return torch.tensor([row for _, row in sorted(last_rows.items())], dtype=torch.int64)
