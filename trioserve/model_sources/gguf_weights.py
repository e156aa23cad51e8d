"""A GGUF file's tensors, in the form in which we keep them. For the converting process: it imports numpy.

    vectors (norms, biases)           F32
    matrices in F32, F16, BF16        as they are
    matrices in Q8_0, Q4_0, Q4_1,     as they are: the blocks' bytes, U8 [rows, bytes per row]
      Q4_K, Q6_K
    matrices in other types           BF16, nearest to what the blocks mean

The `gguf` package, which takes a quarter of a second to import, is asked for the last of these only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources.safetensors_writer import TensorLayout, to_bfloat16

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import GGMLQuantizationType
    from numpy.typing import NDArray

    from trioserve.model_sources.gguf_header import TensorEntry

__all__ = ["GgufWeights"]

_PIECE = 2**20
"""Elements dequantized at a time: `gguf` makes several copies on the way."""


@attrs.frozen
class _Type:
    """One of GGUF's types for the elements of a tensor."""

    name: str
    block: int
    """Elements in a block."""
    block_bytes: int

    @property
    def is_plain(self) -> bool:
        return self.block == 1


_KEPT = {
    0: _Type("F32", 1, 4),
    1: _Type("F16", 1, 2),
    30: _Type("BF16", 1, 2),
    2: _Type("Q4_0", 32, 18),
    3: _Type("Q4_1", 32, 20),
    8: _Type("Q8_0", 32, 34),
    12: _Type("Q4_K", 256, 144),
    14: _Type("Q6_K", 256, 210),
}
"""By number (ggml.h, `enum ggml_type`): what is written as it is, because it can be served as it is."""


class GgufWeights:
    """The tensors of one file, mapped into memory: only what is asked for is read.

    Its methods raise:
      ModelSourceError: the file is cut off or damaged.
      ModelNotSupportedError: the type of a tensor is not known.
    """

    def __init__(self, path: Path) -> None:
        self._data: NDArray[np.uint8] = np.memmap(path, mode="r")

    def layout(self, entry: TensorEntry) -> TensorLayout:
        """What `load` returns."""
        kept = _KEPT.get(entry.type)
        if len(entry.shape) == 1:
            return TensorLayout("F32", entry.shape)
        if kept is None:
            return TensorLayout("BF16", entry.shape)
        if kept.is_plain:
            return TensorLayout(kept.name, entry.shape)
        return TensorLayout("U8", (*entry.shape[:-1], _row_bytes(entry, kept)), kept.name)

    def load(self, entry: TensorEntry) -> NDArray[Any]:
        """The tensor, as `layout` says. BF16 as uint16."""
        kept = _KEPT.get(entry.type)
        if len(entry.shape) == 1:
            return self.floats(entry)
        if kept is None:
            return to_bfloat16(self.floats(entry))
        raw = self._raw(entry, kept)
        types: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
        return raw.view(types.get(kept.name, np.uint8))

    def type_name(self, entry: TensorEntry) -> str:
        """GGUF's name of its type."""
        kept = _KEPT.get(entry.type)
        return _quantization_of(entry).name if kept is None else kept.name

    def floats(self, entry: TensorEntry) -> NDArray[np.float32]:
        """What the tensor means, in float32, in its shape."""
        kept = _KEPT.get(entry.type)
        if kept is None or kept.name not in {"F32", "F16"}:
            return self._dequantize(entry)
        values = self._raw(entry, kept).view(np.float32 if kept.name == "F32" else np.float16)
        return values.astype(np.float32).reshape(entry.shape)

    def _raw(self, entry: TensorEntry, kind: _Type) -> NDArray[np.uint8]:
        """Its bytes: [..., bytes of a row]."""
        row_bytes = _row_bytes(entry, kind)
        rows = math.prod(entry.shape[:-1])
        raw = self._data[entry.offset : entry.offset + rows * row_bytes]
        if len(raw) != rows * row_bytes:
            raise ModelSourceError(f"The file is cut off: the tensor {entry.name} is not all there.")
        return raw.reshape(*entry.shape[:-1], row_bytes)

    def _dequantize(self, entry: TensorEntry) -> NDArray[np.float32]:
        from gguf import GGML_QUANT_SIZES  # noqa: PLC0415 - see above
        from gguf.quants import dequantize  # noqa: PLC0415

        kind = _quantization_of(entry)
        raw = self._raw(entry, _Type(kind.name, *GGML_QUANT_SIZES[kind]))
        rows = raw.reshape(-1, raw.shape[-1])
        values = np.empty((len(rows), entry.shape[-1]), np.float32)
        step = max(1, _PIECE // entry.shape[-1])
        try:
            for start in range(0, len(rows), step):
                values[start : start + step] = dequantize(rows[start : start + step], kind)
        except NotImplementedError:
            raise _unknown_type(entry, kind.name) from None
        return values.reshape(entry.shape)


def _quantization_of(entry: TensorEntry) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType  # noqa: PLC0415 - see above

    try:
        return GGMLQuantizationType(entry.type)
    except ValueError:
        raise _unknown_type(entry, str(entry.type)) from None


def _row_bytes(entry: TensorEntry, kind: _Type) -> int:
    blocks, rest = divmod(entry.shape[-1], kind.block)
    if rest:
        raise ModelSourceError(
            f"The file is damaged: rows of the tensor {entry.name} have {entry.shape[-1]} elements, which is "
            f"no multiple of {kind.block} ({kind.name})."
        )
    return blocks * kind.block_bytes


def _unknown_type(entry: TensorEntry, kind: str) -> ModelNotSupportedError:
    return ModelNotSupportedError(
        f"The tensor {entry.name} is quantized as {kind}, which is not supported. Supported are F32, F16, "
        "BF16, and the usual Q and IQ types."
    )
