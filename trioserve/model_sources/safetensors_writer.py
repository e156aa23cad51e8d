"""Writes a safetensors file tensor by tensor, so that one of them is in memory at a time.

Format: 8 bytes little-endian length of the header, the header (JSON), then the tensors' bytes.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["TensorLayout", "to_bfloat16", "write_safetensors"]

_ITEM_SIZES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element, by the format's names."""

_CHUNK = 2**17
"""Elements rounded at a time."""


@attrs.frozen
class TensorLayout:
    """What is stored under one name."""

    kind: str
    """One of U8, BF16, F16, F32."""
    shape: tuple[int, ...]
    blocks: str | None = None
    """U8 only: the GGUF type of the blocks that the bytes are. In the file's `__metadata__`, under the
    tensor's name."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_SIZES[self.kind]


def write_safetensors(
    path: Path, layouts: Mapping[str, TensorLayout], load: Callable[[str], NDArray[Any]]
) -> None:
    """Write the tensors of `layouts`, in that order; `load` gives each, as it is laid out (BF16: uint16)."""
    with path.open("wb") as file:
        header = _header(layouts)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, layout in layouts.items():
            values = load(name)
            assert values.shape == layout.shape, (name, values.shape, layout)
            assert values.nbytes == layout.num_bytes, (name, values.dtype, layout)
            file.write(np.ascontiguousarray(values).data)
        file.flush()
        # The rename that publishes the directory must not reach the disk before the weights do.
        os.fsync(file.fileno())


def _header(layouts: Mapping[str, TensorLayout]) -> bytes:
    blocks = {name: layout.blocks for name, layout in layouts.items() if layout.blocks is not None}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **blocks}}
    offset = 0
    for name, layout in layouts.items():
        end = offset + layout.num_bytes
        entries[name] = {
            "dtype": layout.kind,
            "shape": list(layout.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each value; of two equally near ones, the even."""
    rounded = np.empty(values.shape, dtype=np.uint16)
    flat, target = values.reshape(-1), rounded.reshape(-1)
    for start in range(0, flat.size, _CHUNK):  # in pieces that stay in the processor's cache
        _round(flat[start : start + _CHUNK], target[start : start + _CHUNK])
    return rounded


def _round(values: NDArray[np.float32], target: NDArray[np.uint16]) -> None:
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= 16
    target[:] = rounded
    # Rounding would carry the bits of some NaNs over into the sign.
    target[np.isnan(values)] = 0x7FC0
