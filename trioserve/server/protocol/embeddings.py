"""POST /v1/embeddings: the request and the answer."""

from __future__ import annotations

import attrs

from trioserve.server.protocol.pooling_fields import FormatFields, PromptUsage

__all__ = ["Embedding", "EmbeddingList", "EmbeddingRequest"]


@attrs.frozen(kw_only=True)
class EmbeddingRequest(FormatFields):
    dimensions: int | None = None
    """As in `trioserve.pooling_params.PoolingParams`."""


@attrs.frozen(kw_only=True)
class Embedding:
    index: int
    object: str = "embedding"
    embedding: list[float] | bytes
    """Bytes are written as base64."""


@attrs.frozen(kw_only=True)
class EmbeddingList:
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage
