"""What the description says of the routes of pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.server.openapi_route import GENERATION_FAILURES, Body, Route
from trioserve.server.protocol.classification import ClassificationList
from trioserve.server.protocol.cohere import CohereEmbeddings
from trioserve.server.protocol.embeddings import EmbeddingList
from trioserve.server.protocol.pooling import PooledList
from trioserve.server.protocol.pooling_readers import (
    CLASSIFY_READER,
    COHERE_EMBED_READER,
    EMBEDDING_READER,
    POOLING_READER,
    RERANK_READER,
    SCORE_READER,
)
from trioserve.server.protocol.scoring import Ranking, ScoreList

if TYPE_CHECKING:
    from trioserve.server.protocol.reading import RequestReader

__all__ = ["BYTES", "POOLING_READERS", "POOLING_ROUTES"]

BYTES = Body("application/octet-stream", {"type": "string", "contentMediaType": "application/octet-stream"})


def _pooling(
    path: str, operation_id: str, summary: str, reader: RequestReader[Any], answer: type, *more: Body
) -> Route:
    return Route(
        path=path,
        method="post",
        operation_id=operation_id,
        summary=summary,
        answers={200: (Body.json(answer), *more)},
        failures=GENERATION_FAILURES,
        reader=reader,
    )


_SCORE = "How well queries and documents fit"
_RERANK = "Documents, those that fit a query best first"

POOLING_ROUTES = (
    _pooling(
        "/v1/embeddings", "create_embedding", "Texts as vectors", EMBEDDING_READER, EmbeddingList, BYTES
    ),
    _pooling(
        "/v2/embed", "cohere_embed", "Texts as vectors, as Cohere's API does", COHERE_EMBED_READER,
        CohereEmbeddings,
    ),
    _pooling(
        "/pooling", "pool", "What a model that pools makes of texts", POOLING_READER, PooledList, BYTES
    ),
    _pooling("/classify", "classify", "How likely each label is", CLASSIFY_READER, ClassificationList),
    _pooling("/score", "score", _SCORE, SCORE_READER, ScoreList),
    _pooling("/v1/score", "score_v1", _SCORE, SCORE_READER, ScoreList),
    _pooling("/rerank", "rerank", _RERANK, RERANK_READER, Ranking),
    _pooling("/v1/rerank", "rerank_v1", _RERANK, RERANK_READER, Ranking),
    _pooling("/v2/rerank", "rerank_v2", _RERANK, RERANK_READER, Ranking),
)  # fmt: skip

POOLING_READERS = (
    EMBEDDING_READER, POOLING_READER, CLASSIFY_READER, SCORE_READER, RERANK_READER, COHERE_EMBED_READER
)  # fmt: skip
