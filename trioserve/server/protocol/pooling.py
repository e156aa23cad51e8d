"""POST /pooling: the request and the answer; and what comes in a header where the answer is bytes."""

from __future__ import annotations

import attrs
from msgspec import UNSET, UnsetType

from trioserve.server.protocol.pooling_fields import (
    EmbedDtype,
    Endianness,
    FormatFields,
    PromptUsage,
)
from trioserve.tasks import PoolingTask

__all__ = ["BytesMetadata", "Extent", "Pooled", "PooledList", "PoolingRequest"]


@attrs.frozen(kw_only=True)
class PoolingRequest(FormatFields):
    task: PoolingTask | None = None
    """None: the first that the model has."""
    dimensions: int | None = None
    """As in `trioserve.pooling_params.PoolingParams`."""


@attrs.frozen(kw_only=True)
class Pooled:
    index: int
    object: str = "pooling"
    data: list[float] | list[list[float]] | bytes
    """For the tasks token_... one list per token. Bytes are written as base64."""
    shape: list[int] | UnsetType = UNSET
    """Of what base64 holds: [values], or [tokens, values]."""


@attrs.frozen(kw_only=True)
class PooledList:
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PromptUsage


@attrs.frozen(kw_only=True)
class Extent:
    """One input's part of a body of bytes."""

    index: int
    embed_dtype: EmbedDtype
    endianness: Endianness
    start: int
    end: int
    """In bytes, exclusive."""
    shape: list[int]


@attrs.frozen(kw_only=True)
class BytesMetadata:
    """The header `metadata`."""

    id: str
    created: int
    model: str
    data: list[Extent]
    usage: PromptUsage
