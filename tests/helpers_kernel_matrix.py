"""Weights for the CPU engine's packed matrices, and what they are by numpy and by the gguf package."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from trioserve_kernels.native import Format, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trioserve_kernels.native import PackedMatrix

__all__ = [
    "DENSE",
    "LOSSLESS",
    "as_bf16",
    "blocks",
    "dense_rows",
    "from_bf16",
    "in_two_parts",
    "panels",
    "quantized_to_q4",
    "quantized_to_q8",
    "unpacked_panels",
    "values_of_blocks",
]

LOSSLESS = {
    Source.Q8_0: Format.Q8,
    Source.Q4_0: Format.Q4,
    Source.Q4_1: Format.Q4,
    Source.Q4_K: Format.Q4_WIDE,
    Source.Q6_K: Format.Q8_16,
}
"""The format that holds each kind of blocks as they are."""

DENSE = [Source.F32, Source.BF16, Source.FP16]

_FP16_FIELDS = {
    Source.Q8_0: [0],
    Source.Q4_0: [0],
    Source.Q4_1: [0, 2],
    Source.Q4_K: [0, 2],
    Source.Q6_K: [208],
}
"""Where a block's numbers of fp16 begin, in bytes."""


def as_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, by torch."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def in_two_parts(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sums of the nearest bf16 and the one nearest to what it leaves."""
    high = from_bf16(as_bf16(values))
    return high + from_bf16(as_bf16(values - high))


def dense_rows(source: Source, values: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Values as rows of a source, and what they are then."""
    if source is Source.BF16:
        rows = as_bf16(values)
        return rows, from_bf16(rows)
    if source is Source.FP16:
        halves = values.astype(np.float16)
        return halves, halves.astype(np.float32)
    return values, values


def _kind(source: Source) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[source.name]


def blocks(source: Source, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random blocks [rows, bytes] that are valid: their fp16 are finite, from denormal to some hundreds."""
    random = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[_kind(source)]
    out = random.integers(0, 256, (rows, columns // values, size), np.uint8)
    for field in _FP16_FIELDS[source]:
        bits = random.integers(0, 0x5C00, out.shape[:2], np.uint16)
        bits |= random.integers(0, 2, out.shape[:2], np.uint16) << 15
        out[..., field : field + 2] = bits[..., np.newaxis].view(np.uint8)
    return out.reshape(rows, -1)


def values_of_blocks(source: Source, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What blocks stand for, by the gguf package: fp32 [rows, columns]."""
    return gguf.quants.dequantize(data, _kind(source)).astype(np.float32)


def _groups(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """[rows, groups, 32], the last group filled up with zeros."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 32)))
    return padded.reshape(len(values), -1, 32)


def _through_fp16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values.astype(np.float16).astype(np.float32)


def _steps(values: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scale == 0, np.float32(0), np.rint(values / scale))


def quantized_to_q8(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """scale q, q from -127 to 127, scale = largest / 127 in fp16, per 32 columns."""
    groups = _groups(values)
    scale = _through_fp16(np.abs(groups).max(axis=2, keepdims=True) / np.float32(127))
    out = scale * np.clip(_steps(groups, scale), -127, 127)
    return out.reshape(len(values), -1)[:, : values.shape[1]]


def quantized_to_q4(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """scale q + minimum, q from 0 to 15, scale and minimum in fp16, per 32 columns."""
    groups = _groups(values)
    minimum = _through_fp16(groups.min(axis=2, keepdims=True))
    span = np.maximum(groups.max(axis=2, keepdims=True) - minimum, np.float32(0))
    scale = _through_fp16(span / np.float32(15))
    out = scale * np.clip(_steps(groups - minimum, scale), 0, 15) + minimum
    return out.reshape(len(values), -1)[:, : values.shape[1]]


def _panel_values(matrix: PackedMatrix) -> tuple[int, int]:
    return -(-matrix.rows // 16), -(-matrix.columns // 32) * 32


def unpacked_panels(matrix: PackedMatrix) -> NDArray[np.float32]:
    """All rows and columns, padding included, as products that take floats see them (`cpu/unpack.h`)."""
    count, columns = _panel_values(matrix)
    floats = np.empty((count, columns, 16), np.float32)
    matrix.library.functions.ts_test_unpack(
        ctypes.c_void_p(matrix.handle), ctypes.c_void_p(floats.ctypes.data)
    )
    return floats.transpose(0, 2, 1).reshape(count * 16, columns)


def panels(matrix: PackedMatrix) -> NDArray[np.uint8]:
    """A matrix's panels as they lie, of one format: bytes [panels, bytes of one]."""
    out = np.empty(matrix.nbytes, np.uint8)
    matrix.library.functions.ts_test_panels(ctypes.c_void_p(matrix.handle), ctypes.c_void_p(out.ctypes.data))
    return out.reshape(_panel_values(matrix)[0], -1)
