"""Which encoder a model gets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.models.bert_config import bert_config
from trioserve.worker.checkpoint import read_config

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.worker.text_encoder import TextEncoder

__all__ = ["make_text_encoder"]


def make_text_encoder(model: ResolvedModel, config: EngineConfig) -> TextEncoder:
    """BERT and what is built like it by our own definition, everything else by transformers.

    Raises:
      ModelNotSupportedError, ModelSourceError: see the encoders.
    """
    bert = bert_config(model.architecture, read_config(Path(model.directory)))
    # With torch, which takes seconds.
    if bert is None:
        from trioserve.worker.transformers_encoder import TransformersEncoder  # noqa: PLC0415

        return TransformersEncoder(model, config.threads)
    from trioserve.worker.torch_bert import TorchBert  # noqa: PLC0415

    return TorchBert(model, bert, config.threads, reason="there are no native kernels")
