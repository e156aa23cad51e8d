"""Reads the weights of a BERT from a checkpoint. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.errors import ModelNotSupportedError
from trioserve.models.bert_weights import Affine, BertLayerWeights, BertWeights
from trioserve.worker.checkpoint import Checkpoint
from trioserve.worker.float_tensors import read_floats

if TYPE_CHECKING:
    import numpy as np

    from trioserve.models.bert_config import BertConfig

__all__ = ["read_bert_weights"]


def read_bert_weights(config: BertConfig, checkpoint: Checkpoint) -> BertWeights:
    """What the encoder needs; whatever else the checkpoint holds, such as heads for training, is left.

    Raises:
      ModelNotSupportedError: a tensor is missing, or has another shape than config.json says.
      ModelSourceError: a file is damaged.
    """
    names = config.names
    reader = _Reader(checkpoint, _prefix(config, checkpoint))
    width = config.hidden_size
    return BertWeights(
        words=reader.tensor(f"{names.word_embeddings}.weight", config.vocab_size, width),
        positions=reader.tensor(f"{names.position_embeddings}.weight", config.num_positions, width),
        types=reader.tensor(f"{names.type_embeddings}.weight", config.num_types, width)
        if config.num_types
        else None,
        norm=reader.norm(names.embedding_norm, width),
        layers=tuple(_layer(config, reader, index) for index in range(config.num_layers)),
    )


def _layer(config: BertConfig, reader: _Reader, index: int) -> BertLayerWeights:
    names, width, inner = config.names, config.hidden_size, config.intermediate_size
    prefix = names.layer.format(index)
    return BertLayerWeights(
        query=reader.linear(prefix + names.query, width, width),
        key=reader.linear(prefix + names.key, width, width),
        value=reader.linear(prefix + names.value, width, width),
        output=reader.linear(prefix + names.output, width, width),
        attention_norm=reader.norm(prefix + names.attention_norm, width),
        up=reader.linear(prefix + names.up, inner, width),
        down=reader.linear(prefix + names.down, width, inner),
        output_norm=reader.norm(prefix + names.output_norm, width),
    )


def _prefix(config: BertConfig, checkpoint: Checkpoint) -> str:
    name = f"{config.names.word_embeddings}.weight"
    for prefix in ("", config.names.base):
        if prefix + name in checkpoint.names:
            return prefix
    raise ModelNotSupportedError(f"The checkpoint lacks {name}.")


@attrs.frozen
class _Reader:
    checkpoint: Checkpoint
    prefix: str

    def linear(self, name: str, out_features: int, in_features: int) -> Affine:
        return Affine(
            self.tensor(f"{name}.weight", out_features, in_features),
            self.tensor(f"{name}.bias", out_features),
        )

    def norm(self, name: str, width: int) -> Affine:
        """Checkpoints that came from TensorFlow say gamma and beta."""
        is_old = f"{self.prefix}{name}.gamma" in self.checkpoint.names
        weight, bias = ("gamma", "beta") if is_old else ("weight", "bias")
        return Affine(self.tensor(f"{name}.{weight}", width), self.tensor(f"{name}.{bias}", width))

    def tensor(self, name: str, *shape: int) -> np.ndarray:
        return read_floats(self.checkpoint, self.prefix + name, shape)
