"""A decoder's weights in the forms that the native kernels read: packed matrices, and vectors in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs
import numpy as np

from trioserve.models.checkpoint_names import is_redundant, norm_names, tensor_names
from trioserve.models.config import DecoderConfig
from trioserve.models.decoder_config import decoder_config
from trioserve.models.products import products
from trioserve.models.rotary import rotary_frequencies
from trioserve.worker.checkpoint import Blocks, Checkpoint, check_names, open_checkpoint, read_config
from trioserve.worker.packing import MatrixPlan, Packer
from trioserve_kernels.native import PackedMatrix

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel
    from trioserve.models.config import LayerConfig
    from trioserve_kernels.native import Library, ThreadPool

__all__ = ["LayerWeights", "NativeWeights", "load_native_weights"]


@attrs.frozen(eq=False)
class LayerWeights:
    matrices: Mapping[str, PackedMatrix]
    """By the keys of `trioserve.models.products`; gate and up rows are interleaved by eights."""
    norms: Mapping[str, np.ndarray]
    """By the keys of `norm_names`, and "query" and "key" if heads are normed; fp32, with the offset added."""
    rotary_frequencies: np.ndarray
    """fp32 [head_dim / 2], radians per token."""


@attrs.frozen(eq=False)
class NativeWeights:
    """Owns the matrices, until it is closed (it is a context)."""

    config: DecoderConfig
    embedding: PackedMatrix
    head: PackedMatrix
    """The embedding, where both are one."""
    final_norm: np.ndarray
    """fp32 [hidden_size], with the offset added."""
    layers: list[LayerWeights]
    matrices: ExitStack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.matrices.close()


def load_native_weights(model: ResolvedModel, library: Library, pool: ThreadPool) -> NativeWeights:
    """Read config.json and every *.safetensors file of `model.directory`.

    The files are mapped into memory and packed matrix by matrix, so that the peak is one copy of the model.

    Raises:
      ModelNotSupportedError: no native implementation, or one that does not fit the checkpoint's tensors.
      ModelSourceError: a file is missing or damaged.
    """
    directory = Path(model.directory)
    config = decoder_config(model.architecture, read_config(directory))
    with open_checkpoint(directory) as checkpoint, ExitStack() as matrices:
        needed = set(tensor_names(config))
        check_names(checkpoint.names, needed, is_redundant=partial(is_redundant, config))
        packer = Packer(model, library, pool, checkpoint, matrices)
        reader = _Reader(config, checkpoint, packer)
        embedding = reader.table("model.embed_tokens")
        return NativeWeights(
            config=reader.config,
            embedding=embedding,
            head=embedding if reader.config.tie_word_embeddings else reader.table("lm_head"),
            final_norm=reader.norm("model.norm", reader.config.hidden_size),
            layers=[reader.layer(index, layer) for index, layer in enumerate(reader.config.layers)],
            matrices=matrices.pop_all(),
        )


@attrs.frozen
class _Reader:
    config: DecoderConfig
    checkpoint: Checkpoint
    packer: Packer

    def table(self, name: str) -> PackedMatrix:
        return self.packer.pack(
            MatrixPlan(self.config.hidden_size, {name: self.config.vocab_size}, is_table=True)
        )

    def layer(self, index: int, layer: LayerConfig) -> LayerWeights:
        prefix = f"model.layers.{index}"
        norms = {
            place: self.norm(f"{prefix}.{name}", self.config.hidden_size)
            for place, name in norm_names(self.config).items()
        }
        if self.config.query_key_norm:
            norms["query"] = self.norm(f"{prefix}.self_attn.q_norm", self.config.head_dim)
            norms["key"] = self.norm(f"{prefix}.self_attn.k_norm", self.config.head_dim)
        frequencies: np.ndarray = rotary_frequencies(layer.rotary, self.config.head_dim)
        return LayerWeights(self._products(prefix), norms, frequencies)

    def norm(self, name: str, size: int) -> np.ndarray:
        stored = self.checkpoint.get(f"{name}.weight", [size])
        assert not isinstance(stored, Blocks), "blocks are matrices"
        return stored.to_float32() + np.float32(self.config.norm_offset)

    def _products(self, prefix: str) -> dict[str, PackedMatrix]:
        config = self.config
        has_bias = {"qkv": config.qkv_bias, "output": config.output_bias}
        return {
            name: self.packer.pack(
                MatrixPlan(
                    product.in_features,
                    {f"{prefix}.{product.parent}.{part}": rows for part, rows in product.parts.items()},
                    is_gate_up=name == "gate_up",
                    has_bias=has_bias.get(name, config.mlp_bias),
                )
            )
            for name, product in products(config).items()
        }
