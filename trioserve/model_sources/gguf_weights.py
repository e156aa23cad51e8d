"""A GGUF file's tensors, dequantized. Runs in the converting process: it imports numpy and gguf."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from trioserve.errors import ModelNotSupportedError, ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from trioserve.model_sources.gguf_header import TensorEntry

__all__ = ["GgufWeights"]

_PIECE = 2**20
"""Elements dequantized at a time: `gguf` makes several copies on the way."""


class GgufWeights:
    """The tensors of one file, mapped into memory: only what is asked for is read."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, mode="r")

    def load(self, entry: TensorEntry) -> NDArray[np.float32]:
        """The tensor in float32, in its shape.

        Raises:
          ModelSourceError: the file is cut off.
          ModelNotSupportedError: the quantization is not known.
        """
        kind = _quantization_of(entry)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = entry.shape[-1] // block * block_bytes
        rows = math.prod(entry.shape[:-1])
        raw = self._data[entry.offset : entry.offset + rows * row_bytes]
        if len(raw) != rows * row_bytes:
            raise ModelSourceError(f"The file is cut off: the tensor {entry.name} is not all there.")
        values = np.empty((rows, entry.shape[-1]), np.float32)
        step = max(1, _PIECE // entry.shape[-1])
        try:
            for start in range(0, rows, step):
                piece = raw[start * row_bytes : (start + step) * row_bytes].reshape(-1, row_bytes)
                values[start : start + step] = dequantize(piece, kind)
        except NotImplementedError:
            raise _unknown_quantization(entry, kind.name) from None
        return values.reshape(entry.shape)


def _quantization_of(entry: TensorEntry) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(entry.type)
    except ValueError:
        raise _unknown_quantization(entry, str(entry.type)) from None


def _unknown_quantization(entry: TensorEntry, kind: str) -> ModelNotSupportedError:
    return ModelNotSupportedError(
        f"The tensor {entry.name} is quantized as {kind}, which is not supported. Supported are F32, F16, "
        "BF16, and the usual Q and IQ types."
    )
