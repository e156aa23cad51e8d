"""A decoder of the native kernels: what the shape and the layers of a model are to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from trioserve_kernels.native import (
    Activation,
    Decoder,
    DecoderLayer,
    DecoderShape,
    Element,
    KvFormat,
)

if TYPE_CHECKING:
    from trioserve.config import CacheConfig, DType
    from trioserve.models.config import DecoderConfig
    from trioserve.worker.layer_groups import LayerGroups
    from trioserve.worker.native_weights import NativeWeights
    from trioserve_kernels.native import ThreadPool

__all__ = ["decoder_shape", "make_decoder"]

_ELEMENTS: Final = {"bfloat16": Element.BF16, "float32": Element.F32}
_KV_FORMATS: Final = {"bfloat16": KvFormat.BF16, "float32": KvFormat.F32}
_ACTIVATIONS: Final = {"silu": Activation.SILU, "gelu_tanh": Activation.GELU_TANH}


def decoder_shape(
    config: DecoderConfig, dtype: DType, cache: CacheConfig, groups: LayerGroups
) -> DecoderShape:
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        activation=_ACTIVATIONS[config.activation],
        element=_ELEMENTS[dtype],
        kv_format=KvFormat.INT8 if cache.dtype == "int8" else _KV_FORMATS[dtype],
        block_size=cache.block_size,
        num_groups=len(groups.windows),
        group_places=groups.size,
        rms_norm_eps=config.rms_norm_eps,
        attention_scale=config.attention_scale,
        embedding_scale=_rounded(config.embedding_scale, dtype),
        logit_softcap=config.logit_softcap or 0.0,
    )


def _rounded(scale: float, dtype: DType) -> float:
    """To the nearest number of the dtype; of two, to the even one."""
    bits = int(np.float32(scale).view(np.uint32))
    if dtype == "bfloat16":  # the upper half of a float32
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


def make_decoder(
    pool: ThreadPool, weights: NativeWeights, shape: DecoderShape, groups: LayerGroups
) -> Decoder:
    """To be closed before `weights` and `pool`."""
    layers = [
        DecoderLayer(
            qkv=layer.matrices["qkv"],
            output=layer.matrices["output"],
            gate_up=layer.matrices["gate_up"],
            down=layer.matrices["down"],
            attention_norm=layer.norms["attention"],
            mlp_norm=layer.norms["mlp"],
            attention_output_norm=layer.norms.get("attention_output"),
            mlp_output_norm=layer.norms.get("mlp_output"),
            query_norm=layer.norms.get("query"),
            key_norm=layer.norms.get("key"),
            rotary_frequencies=layer.rotary_frequencies,
            window=groups.windows[group],
            group=group,
            place=place,
        )
        for layer, (group, place) in zip(weights.layers, groups.places, strict=True)
    ]
    return Decoder(
        pool,
        shape,
        embedding=weights.embedding,
        head=weights.head,
        final_norm=weights.final_norm,
        layers=layers,
    )
