"""Encodes texts by the native kernels: a call for the embeddings, and one for all layers."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.worker.bert_weights import read_bert_weights
from trioserve.worker.checkpoint import open_checkpoint
from trioserve_kernels.native import (
    Activation,
    Element,
    EncoderLayer,
    EncoderShape,
    LinearWeights,
    NativeEmbedding,
    NativeEncoder,
    NormWeights,
    ThreadPool,
)

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel
    from trioserve.models.bert_config import BertActivation, BertConfig
    from trioserve.models.bert_weights import Affine, BertLayerWeights, BertWeights
    from trioserve.worker.text_encoder import PackedTexts
    from trioserve_kernels.native import Library

__all__ = ["NativeBert"]

_ACTIVATIONS: dict[BertActivation, Activation] = {
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


class NativeBert:
    """See `trioserve.worker.text_encoder.TextEncoder`. A text's result does not depend on what is beside it.

    Owns `threads` threads, the caller's included. Imports no torch; where something else has brought it, its
    own threads would be in the way: it is told to use one in the thread that calls.

    Raises:
      ModelNotSupportedError, ModelSourceError: see `read_bert_weights`.
    """

    def __init__(self, library: Library, model: ResolvedModel, config: BertConfig, threads: int) -> None:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        self.kernels = f"{library.tier} kernels in {threads} thread{'s' if threads > 1 else ''}"
        self._source = model
        self._config = config
        self._closing = ExitStack()
        self._pool = self._closing.enter_context(ThreadPool(library, threads))
        self._loaded: _Loaded | None = None
        # Invariant: None exactly between free_weights and load_weights, and after close.
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self.load_weights()
            on_error.pop_all()

    def encode(self, texts: PackedTexts) -> np.ndarray:
        assert self._loaded is not None, "the weights have been freed"
        ids = [texts.token_ids, texts.positions + self._config.first_position]
        if self._config.num_types:
            ids.append(np.minimum(texts.type_ids, self._config.num_types - 1))  # RoBERTa has one type only
        hidden: np.ndarray = self._loaded.embedding(*(array.astype(np.int32) for array in ids))
        self._loaded.encoder.forward_in_place(hidden, texts.lengths)
        return hidden

    def free_weights(self) -> None:
        if self._loaded is not None:
            self._loaded.encoder.close()
            self._loaded = None

    def load_weights(self) -> None:
        if self._loaded is None:
            with open_checkpoint(Path(self._source.directory)) as checkpoint:
                weights = read_bert_weights(self._config, checkpoint)
            self._loaded = _Loaded(
                _embedding(self._config, weights, self._pool),
                NativeEncoder(self._pool, self._shape, [_layer(layer) for layer in weights.layers]),
            )

    def close(self) -> None:
        self.free_weights()
        self._closing.close()

    @property
    def _shape(self) -> EncoderShape:
        return EncoderShape(
            hidden_size=self._config.hidden_size,
            num_heads=self._config.num_heads,
            intermediate_size=self._config.intermediate_size,
            norm_eps=self._config.norm_eps,
            activation=_ACTIVATIONS[self._config.activation],
            element=Element.F32 if self._source.dtype == "float32" else Element.BF16,
        )


@attrs.frozen(eq=False)
class _Loaded:
    embedding: NativeEmbedding
    encoder: NativeEncoder


def _embedding(config: BertConfig, weights: BertWeights, pool: ThreadPool) -> NativeEmbedding:
    tables = [weights.words, weights.positions]
    if weights.types is not None:
        tables.append(weights.types)
    return NativeEmbedding(pool, tables, _norm(weights.norm), config.norm_eps)


def _layer(weights: BertLayerWeights) -> EncoderLayer:
    return EncoderLayer(
        query=_linear(weights.query),
        key=_linear(weights.key),
        value=_linear(weights.value),
        output=_linear(weights.output),
        attention_norm=_norm(weights.attention_norm),
        up=_linear(weights.up),
        down=_linear(weights.down),
        mlp_norm=_norm(weights.output_norm),
    )


def _linear(weights: Affine) -> LinearWeights:
    return LinearWeights(weights.weight, weights.bias)


def _norm(weights: Affine) -> NormWeights:
    return NormWeights(weights.weight, weights.bias)
