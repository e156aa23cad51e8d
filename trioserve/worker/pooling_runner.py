"""Computes a step of a pooling model: whole texts, each pooled as its request asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trioserve.worker.pooling_batch import PooledSequence
from trioserve.worker.pooling_head import load_head
from trioserve.worker.pooling_results import PoolingResults
from trioserve.worker.text_encoder import pack_texts
from trioserve.worker.text_encoders import make_text_encoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.worker.pooling_batch import PoolingSequence

__all__ = ["PoolingRunner"]


class PoolingRunner:
    """See `trioserve.core.pooling.PoolingRunner`. All calls are to be made in the thread that made it.

    Raises:
      InvalidConfigError: kernels are asked for that are not there.
      ModelNotSupportedError, ModelSourceError: see `make_text_encoder` and `load_head`.
    """

    def __init__(self, model: ResolvedModel, config: EngineConfig) -> None:
        assert model.pooler is not None, "a model for runner=pooling has a pooler"
        self._results = PoolingResults(model.pooler, load_head(model))
        self._encoder = make_text_encoder(model, config)

    @property
    def kernels(self) -> str:
        return self._encoder.kernels

    def pool(self, batch: Sequence[PoolingSequence]) -> list[PooledSequence]:
        if not batch:
            return []
        texts = pack_texts(batch)
        hidden = self._encoder.encode(texts)
        bounds = texts.starts
        return [
            self._pool_one(hidden[start:end], sequence)
            for sequence, start, end in zip(batch, bounds, bounds[1:], strict=False)
        ]

    def free_weights(self) -> None:
        self._encoder.free_weights()

    def load_weights(self) -> None:
        self._encoder.load_weights()

    def close(self) -> None:
        self._encoder.close()

    def _pool_one(self, hidden: np.ndarray, sequence: PoolingSequence) -> PooledSequence:
        with np.errstate(all="ignore"):  # what is not finite is found below
            data = self._results.compute(hidden, sequence.params)
        if not np.isfinite(data).all():
            return PooledSequence(data=None, failure="the model gave values that are not finite")
        return PooledSequence(data=data)
