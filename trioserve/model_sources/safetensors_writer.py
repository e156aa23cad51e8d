"""Writes a safetensors file tensor by tensor, so that one of them is in memory at a time.

Format: 8 bytes little-endian length of the header, the header (JSON), then the tensors' bytes.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from trioserve.config import DType

__all__ = ["to_bfloat16", "write_safetensors"]

_TYPES: dict[DType, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}
"""The format's name, and bytes per element."""

_CHUNK = 2**17
"""Elements rounded at a time."""


def write_safetensors(
    path: Path,
    dtype: DType,
    shapes: Mapping[str, tuple[int, ...]],
    load: Callable[[str], NDArray[np.float32]],
) -> None:
    """Write the tensors named in `shapes`, in that order; `load` gives each in float32, in its shape."""
    with path.open("wb") as file:
        header = _header(dtype, shapes)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, shape in shapes.items():
            values = load(name)
            assert values.shape == shape, (name, values.shape, shape)
            stored = to_bfloat16(values) if dtype == "bfloat16" else values
            file.write(np.ascontiguousarray(stored).data)
        file.flush()
        # The rename that publishes the directory must not reach the disk before the weights do.
        os.fsync(file.fileno())


def _header(dtype: DType, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    kind, item_size = _TYPES[dtype]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * item_size
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
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
