"""Reads files of tensors in the safetensors format, without copying them. Imports no torch.

The format (https://huggingface.co/docs/safetensors, "Format"): 8 bytes, the length of the header, lowest
first; the header, JSON, which has for each name a dtype, a shape and the range of its bytes; the bytes.
The safetensors library would need torch for bfloat16, which numpy lacks.
"""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import attrs
import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

__all__ = ["StoredTensor", "TensorFile"]

_LENGTH = struct.Struct("<Q")
_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


@attrs.frozen
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@attrs.frozen(eq=False)
class StoredTensor:
    dtype: str
    """As numpy and torch call it."""
    data: np.ndarray
    """In the file's memory; uint16 if the dtype is bfloat16."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.dtype

    def to_float32(self) -> np.ndarray:
        """A copy, rounded if need be."""
        if self.dtype == "bfloat16":  # the upper half of a float32
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32)


class TensorFile:
    """A file in memory: its pages are read as they are touched. A context; tensors outlive it.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # A private copy of what is written, which is nothing; torch takes no memory that it cannot write.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self.metadata, self._entries, self._start = _read_header(self._memory)
        except BaseException:
            self._memory.close()
            raise

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def read(self, name: str) -> StoredTensor:
        """Raises ValueError: its entry in the header is damaged, or of a dtype that is not known."""
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{name} has the unknown dtype {entry.dtype}")
        dtype = _DTYPES[entry.dtype]
        stored = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        begin, end = entry.data_offsets
        size = math.prod(entry.shape)
        if min(entry.shape, default=0) < 0 or begin < 0 or end - begin != size * stored.itemsize:
            raise ValueError(f"{name} has shape {entry.shape}, but bytes {begin} to {end}")
        if self._start + end > len(self._memory):
            raise ValueError(f"{name} ends at {self._start + end}, the file at {len(self._memory)}")
        data = np.frombuffer(self._memory, stored, size, self._start + begin).reshape(entry.shape)
        return StoredTensor(dtype, np.require(data, requirements="A"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(BufferError):  # there are tensors; with the last of them, the memory goes
            self._memory.close()


def _read_header(memory: mmap.mmap) -> tuple[Mapping[str, str], Mapping[str, _Entry], int]:
    """Metadata, entries by name, and where their bytes start."""
    if len(memory) < _LENGTH.size:
        raise ValueError("it is too short")
    (length,) = _LENGTH.unpack_from(memory)
    end = _LENGTH.size + length
    if end > len(memory):
        raise ValueError(f"its header should have {length} bytes")
    try:
        header = msgspec.json.decode(memory[_LENGTH.size : end], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except msgspec.MsgspecError as error:
        raise ValueError(f"its header is damaged: {error}") from error
    return metadata, entries, end
