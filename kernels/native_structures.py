"""What is passed to and from the CPU engine: the mirror of `cpu/api.h`."""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, c_double, c_float, c_int32, c_size_t, c_void_p
from typing import Any, Final

__all__ = ["API_VERSION", "FUNCTIONS", "Activation", "Element", "Format", "KvFormat", "Phase", "Source"]

API_VERSION: Final = 3


class Format(enum.IntEnum):
    """How a segment of a matrix stores its weights (`cpu/format.h`)."""

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q8_16 = 3
    Q4 = 4
    Q4_WIDE = 5
    SPLIT = 6


class Source(enum.IntEnum):
    """Kinds of rows that a matrix is filled from: numbers, or blocks as they lie in a GGUF file."""

    F32 = 0
    BF16 = 1
    FP16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q4_K = 6
    Q6_K = 7


class Activation(enum.IntEnum):
    """Of a decoder's gates (the first two) or of an encoder's MLP (all but the first)."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    """The exact one, by the error function."""
    RELU = 3


class Element(enum.IntEnum):
    """Of activations between products."""

    F32 = 0
    BF16 = 1


class KvFormat(enum.IntEnum):
    """Of cached keys and values."""

    F32 = 0
    BF16 = 1
    INT8 = 2


class Phase(enum.IntEnum):
    """Where a step's time goes."""

    NORM = 0
    QKV = 1
    ATTENTION = 2
    OUTPUT = 3
    GATE_UP = 4
    DOWN = 5
    HEAD = 6


class ShapeStructure(ctypes.Structure):
    _fields_ = (
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_layers", c_int32),
        ("vocab_size", c_int32),
        ("activation", c_int32),
        ("element", c_int32),
        ("kv_format", c_int32),
        ("block_size", c_int32),
        ("num_groups", c_int32),
        ("group_places", c_int32),
        ("rms_norm_eps", c_float),
        ("attention_scale", c_float),
        ("embedding_scale", c_float),
        ("logit_softcap", c_float),
    )


class LayerStructure(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("rotary_frequencies", c_void_p),
        ("window", c_int32),
        ("group", c_int32),
        ("place", c_int32),
    )


class StepStructure(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("starts", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int32),
    )


class EncoderShapeStructure(ctypes.Structure):
    _fields_ = (
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_layers", c_int32),
        ("activation", c_int32),
        ("pre_norm", c_int32),
        ("norm_eps", c_float),
    )


class EncoderLayerStructure(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("attention_norm", c_void_p),
        ("attention_norm_bias", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_norm_bias", c_void_p),
    )


class EmbeddingStructure(ctypes.Structure):
    _fields_ = (("table", c_void_p), ("ids", c_void_p))


_PLACEMENT = (c_int32, c_int32, c_int32)

FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ts_api_version": (c_int32, ()),
    "ts_start": (c_int32, ()),
    "ts_pool_new": (c_void_p, (c_int32,)),
    "ts_pool_free": (None, (c_void_p,)),
    "ts_matrix_new": (c_void_p, (c_int32,)),
    "ts_matrix_add_segment": (None, (c_void_p, c_int32, c_int32)),
    "ts_matrix_fill": (None, (c_void_p, c_void_p, c_int32, c_void_p, c_int32, *_PLACEMENT)),
    "ts_matrix_fill_bias": (None, (c_void_p, c_void_p, c_int32, *_PLACEMENT)),
    "ts_matrix_bytes": (c_size_t, (c_void_p,)),
    "ts_matrix_unpack_row": (None, (c_void_p, c_int32, c_void_p)),
    "ts_matrix_multiply": (None, (c_void_p, c_void_p, c_void_p, c_int32, c_void_p)),
    "ts_matrix_free": (None, (c_void_p,)),
    "ts_dequantize": (None, (c_int32, c_void_p, c_size_t, c_void_p)),
    "ts_decoder_new": (
        c_void_p,
        (POINTER(ShapeStructure), c_void_p, c_void_p, c_void_p, c_void_p, POINTER(LayerStructure)),
    ),
    "ts_decoder_free": (None, (c_void_p,)),
    "ts_decoder_block_bytes": (c_size_t, (c_void_p,)),
    "ts_decoder_set_cache": (None, (c_void_p, c_void_p)),
    "ts_decoder_forward": (None, (c_void_p, POINTER(StepStructure), c_void_p)),
    "ts_decoder_forward_layers": (None, (c_void_p, POINTER(StepStructure), c_int32, c_void_p)),
    "ts_decoder_logits": (None, (c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p)),
    "ts_decoder_times": (None, (c_void_p, POINTER(c_double))),
    "ts_encoder_new": (
        c_void_p,
        (POINTER(EncoderShapeStructure), c_void_p, POINTER(EncoderLayerStructure), c_void_p, c_void_p),
    ),
    "ts_encoder_free": (None, (c_void_p,)),
    "ts_encoder_forward": (None, (c_void_p, c_void_p, c_int32, c_void_p)),
    "ts_encoder_times": (None, (c_void_p, POINTER(c_double))),
    "ts_embed": (
        None,
        (
            c_void_p,
            POINTER(EmbeddingStructure),
            c_int32,
            c_int32,
            c_void_p,
            c_void_p,
            c_float,
            c_int32,
            c_void_p,
        ),
    ),
    "ts_read_bandwidth": (c_double, (c_void_p, c_size_t)),
}
"""Result and arguments of each function."""
