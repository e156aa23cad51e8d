"""Which encoder a model gets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.models.bert_config import bert_config
from trioserve.worker.checkpoint import read_config
from trioserve.worker.native_bert import NativeBert
from trioserve.worker.tiers import choose_library

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.worker.text_encoder import TextEncoder

__all__ = ["make_text_encoder"]


def make_text_encoder(model: ResolvedModel, config: EngineConfig) -> TextEncoder:
    """BERT and what is built like it by the native kernels, or where there are none by our definition in
    torch; everything else by transformers.

    Raises:
      InvalidConfigError: kernels are asked for that are not there, or that cannot compute the model.
      ModelNotSupportedError, ModelSourceError: see the encoders.
    """
    bert = bert_config(model.architecture, read_config(Path(model.directory)))
    obstacle = None if bert else f"the native kernels do not compute {model.architecture}"
    library = choose_library(config.cpu_kernels, obstacle)
    if bert and not isinstance(library, str):
        return NativeBert(library, model, bert, config.threads)
    # With torch, which takes seconds.
    if bert:
        from trioserve.worker.torch_bert import TorchBert  # noqa: PLC0415

        return TorchBert(model, bert, config.threads, reason=str(library))
    from trioserve.worker.transformers_encoder import TransformersEncoder  # noqa: PLC0415

    return TransformersEncoder(model, config.threads)
