"""POST /v1/embeddings and /pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.pooling_params import PoolingParams
from trioserve.server.pooling.number_replies import number_reply
from trioserve.server.pooling.requests import PoolingRequests
from trioserve.server.protocol.embeddings import Embedding, EmbeddingList
from trioserve.server.protocol.pooling import Pooled, PooledList
from trioserve.server.protocol.pooling_readers import EMBEDDING_READER, POOLING_READER

if TYPE_CHECKING:
    from quart import Response

    from trioserve.outputs import PoolingOutput
    from trioserve.server.pooling.number_replies import Content

__all__ = ["Embeddings", "Pooling"]


@attrs.frozen(eq=False)
class Embeddings:
    """The handler of /v1/embeddings."""

    _requests: PoolingRequests

    async def create(self) -> Response:
        request, head = await self._requests.receive(EMBEDDING_READER, "embd")
        params = PoolingParams(
            task="embed", use_activation=request.use_activation, dimensions=request.dimensions
        )
        outputs = await self._requests.pool(request, params, head)
        return await number_reply(request, head, outputs, new_list=EmbeddingList, new_item=_embedding)


@attrs.frozen(eq=False)
class Pooling:
    """The handler of /pooling."""

    _requests: PoolingRequests

    async def create(self) -> Response:
        request, head = await self._requests.receive(POOLING_READER, "pool")
        params = PoolingParams(
            task=request.task, use_activation=request.use_activation, dimensions=request.dimensions
        )
        outputs = await self._requests.pool(request, params, head)
        new_item = _packed if request.encoding_format == "base64" else _pooled
        return await number_reply(request, head, outputs, new_list=PooledList, new_item=new_item)


def _embedding(index: int, _: PoolingOutput, content: Content) -> Embedding:
    return Embedding(index=index, embedding=content)  # type: ignore[arg-type]  # one row per text


def _pooled(index: int, _: PoolingOutput, content: Content) -> Pooled:
    return Pooled(index=index, data=content)


def _packed(index: int, result: PoolingOutput, content: Content) -> Pooled:
    return Pooled(index=index, data=content, shape=result.shape)
