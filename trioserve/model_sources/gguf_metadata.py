"""Numbers from a GGUF file's metadata, checked."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, TypeVar

from trioserve.errors import ModelNotSupportedError, ModelSourceError

if TYPE_CHECKING:
    from trioserve.model_sources.gguf_header import GgufHeader

__all__ = ["decimal", "number"]

Number = TypeVar("Number", int, float)


def number(header: GgufHeader, key: str, kind: type[Number], *, default: Number | None = None) -> Number:
    """The value of `<architecture>.<key>`.

    Raises:
      ModelSourceError: it is missing, and there is no default.
      ModelNotSupportedError: it is of another kind, such as one number for each layer.
    """
    found = header.metadata.get(f"{header.architecture}.{key}", default)
    if found is None:
        raise ModelSourceError(f"The file's metadata has no {header.architecture}.{key}.")
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ModelNotSupportedError(
            f"The file's {header.architecture}.{key} is {found!r:.80}; one number for all is supported."
        )
    return found


def decimal(header: GgufHeader, key: str, *, default: float | None = None) -> float:
    """A float as the shortest decimal that is the same float32: 1e-05, as it was before it was stored."""
    value = number(header, key, float, default=default)
    stored = struct.pack("<f", value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(short for short in candidates if struct.pack("<f", short) == stored)
