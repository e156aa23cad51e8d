"""Encodes texts by our BERT in torch: where there are no native kernels, or not for what is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trioserve.models.bert import Bert
from trioserve.worker.bert_weights import read_bert_weights
from trioserve.worker.checkpoint import open_checkpoint
from trioserve.worker.loader import TORCH_DTYPES

if TYPE_CHECKING:
    import numpy as np

    from trioserve.config import ResolvedModel
    from trioserve.models.bert_config import BertConfig
    from trioserve.worker.text_encoder import PackedTexts

__all__ = ["TorchBert"]


class TorchBert:
    """See `trioserve.worker.text_encoder.TextEncoder`.

    torch keeps its number of compute threads per calling thread; it is set here.

    Args:
      reason: why it is torch that computes.

    Raises:
      ModelNotSupportedError, ModelSourceError: see `read_bert_weights`.
    """

    def __init__(self, model: ResolvedModel, config: BertConfig, threads: int, *, reason: str) -> None:
        self.kernels = f"torch ({reason})"
        self._source = model
        self._config = config
        # Invariant: None exactly between free_weights and load_weights.
        self._model: Bert | None = None
        torch.set_num_threads(threads)
        self.load_weights()

    @torch.inference_mode()
    def encode(self, texts: PackedTexts) -> np.ndarray:
        assert self._model is not None, "the weights have been freed"
        hidden = self._model.forward(
            torch.from_numpy(texts.token_ids),
            torch.from_numpy(texts.positions),
            torch.from_numpy(texts.type_ids),
            texts.lengths,
        )
        rows: np.ndarray = hidden.float().numpy()
        return rows

    def free_weights(self) -> None:
        self._model = None

    @torch.inference_mode()
    def load_weights(self) -> None:
        if self._model is None:
            with open_checkpoint(Path(self._source.directory)) as checkpoint:
                weights = read_bert_weights(self._config, checkpoint)
            self._model = Bert(self._config, weights, TORCH_DTYPES[self._source.dtype])

    def close(self) -> None:
        """There is nothing of its own that would have to end."""
