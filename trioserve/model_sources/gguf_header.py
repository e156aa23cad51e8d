"""The head of a GGUF file: its metadata, and where its tensors are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package has a reader too; it
makes an array object of every token and takes two seconds for what takes a tenth of one here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GgufHeader", "TensorEntry", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's value types as struct's format characters; all little-endian."""


@attrs.frozen
class TensorEntry:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch has it (GGUF writes the fastest dimension first)."""
    type: int
    """A value of `gguf.GGMLQuantizationType`."""
    offset: int
    """Of its first byte, from the start of the file."""


@attrs.frozen
class GgufHeader:
    """What a GGUF file says before its weights."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))


def read_header(path: Path) -> GgufHeader:
    """Read a file's head; the weights are not touched.

    Raises:
      ModelSourceError: it is not a GGUF file of a known version, or is cut off.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Reader(data))
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ModelSourceError(f"{path} is damaged or cut off: its head cannot be read ({error}).") from None
    except (_FormatError, ValueError) as error:
        raise ModelSourceError(f"{path} is not a GGUF file that can be read: {error}.") from None
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read: {error}.") from None


class _FormatError(Exception):
    pass


@attrs.define
class _Reader:
    """Reads values one after the other. Reading past the end raises struct.error."""

    data: mmap.mmap
    position: int = 0

    def bytes(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise struct.error("it ends too early")
        found = self.data[self.position : end]
        self.position = end
        return found

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        # No format of `count` items is made that the file could not fill.
        if count * struct.calcsize("<" + code) > len(self.data) - self.position:
            raise struct.error("it ends too early")
        layout = struct.Struct(f"<{count}{code}")
        found = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return found

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def strings(self, count: int) -> list[str]:
        """As `string`, without a call per item: vocabularies have hundreds of thousands."""
        data, position, unpack = self.data, self.position, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            found.append(data[start:position].decode())
        if position > len(data):
            raise struct.error("it ends too early")
        self.position = position
        return found

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.number(_code_of(kind))

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        return self.strings(count) if kind == _STRING else list(self.numbers(_code_of(kind), count))


def _code_of(kind: int) -> str:
    if kind not in _SCALARS:
        raise _FormatError(f"it holds a value of the unknown type {kind}")
    return _SCALARS[kind]


def _parse(reader: _Reader) -> GgufHeader:
    if reader.bytes(4) != _MAGIC:
        raise _FormatError("it does not begin with GGUF")
    version = reader.number("I")
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise _FormatError(f"it has version {version} (or another byte order); versions {known} are known")
    tensor_count, value_count = reader.numbers("Q", 2)
    metadata = {reader.string(): reader.value() for _ in range(value_count)}
    entries = [_parse_tensor(reader) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-reader.position // alignment) * alignment
    tensors = {entry.name: attrs.evolve(entry, offset=start + entry.offset) for entry in entries}
    return GgufHeader(metadata=metadata, tensors=tensors)


def _parse_tensor(reader: _Reader) -> TensorEntry:
    name = reader.string()
    dimensions = reader.numbers("Q", reader.number("I"))
    return TensorEntry(name, tuple(reversed(dimensions)), reader.number("I"), reader.number("Q"))
