"""The head of a CTranslate2 model file (model.bin): what it is, and where its tensors are.

Format: `ModelSpec.save` in https://github.com/OpenNMT/CTranslate2, python/ctranslate2/specs/model_spec.py.
All is little-endian; strings have their length first, and a zero at the end:

    version u32 | name of the specification | its revision u32 | count u32 | tensors | count u32 | aliases
    tensor: name | rank u8 | sizes u32 each | dtype u8 | bytes u32 | data
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MODEL_FILE", "CTranslate2File", "StoredTensor", "is_ctranslate2", "read_ctranslate2"]

MODEL_FILE = "model.bin"

_VERSION = 6
_DTYPES = {0: "float32", 1: "int8", 2: "int16", 3: "int32", 4: "float16", 5: "bfloat16"}
_MOST = 100_000
"""Tensors; more than any model has."""


@attrs.frozen
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Of its first byte, from the start of the file."""
    num_bytes: int


@attrs.frozen
class CTranslate2File:
    specification: str
    """What kind of model it is, e.g. WhisperSpec."""
    tensors: Mapping[str, StoredTensor]


def is_ctranslate2(directory: Path) -> bool:
    """Does it hold a model in CTranslate2's layout, and none in Hugging Face's?"""
    return (directory / MODEL_FILE).is_file() and not any(directory.glob("*.safetensors"))


def read_ctranslate2(path: Path) -> CTranslate2File:
    """Read a file's head; the weights are not touched.

    Raises:
      ModelSourceError: it is no such file of a known version, or is cut off.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Reader(data))
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelSourceError(
            f"{path} is no model file of CTranslate2 (version {_VERSION}), or damaged: {error}."
        ) from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def numbers(self, kinds: str) -> tuple[int, ...]:
        found = struct.unpack_from(f"<{kinds}", self._data, self.position)
        self.position += struct.calcsize(f"<{kinds}")
        return found

    def string(self) -> str:
        (size,) = self.numbers("H")
        start = self.position
        self.skip(size)
        return self._data[start : self.position - 1].decode()

    def skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self._data):
            raise ValueError("it is cut off")


def _parse(reader: _Reader) -> CTranslate2File:
    (version,) = reader.numbers("I")
    if version != _VERSION:
        raise ValueError(f"its version is {version}")
    specification = reader.string()
    _, count = reader.numbers("II")
    if count > _MOST:
        raise ValueError(f"it says that it has {count} tensors")
    return CTranslate2File(specification, dict(_tensor(reader) for _ in range(count)))


def _tensor(reader: _Reader) -> tuple[str, StoredTensor]:
    name = reader.string()
    (rank,) = reader.numbers("B")
    shape = reader.numbers("I" * rank)
    (kind,) = reader.numbers("B")
    (size,) = reader.numbers("I")
    offset = reader.position
    reader.skip(size)
    if kind not in _DTYPES:
        raise ValueError(f"{name} has the unknown type {kind}")
    return name, StoredTensor(shape, _DTYPES[kind], offset, size)
