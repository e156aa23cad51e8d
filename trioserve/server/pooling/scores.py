"""POST /score and /rerank, under all their spellings."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from trioserve.frontend.prompts import TextPrompt
from trioserve.frontend.scoring import scoring_task
from trioserve.pooling_params import PoolingParams
from trioserve.server.pooling.naming import naming_prompts
from trioserve.server.pooling.requests import PoolingRequests
from trioserve.server.protocol.pooling_fields import PromptUsage
from trioserve.server.protocol.pooling_readers import RERANK_READER, SCORE_READER
from trioserve.server.protocol.scoring import (
    Ranked,
    RankedDocument,
    Ranking,
    Score,
    ScoreList,
    plain_text,
)
from trioserve.server.replies import json_reply

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quart import Response

    from trioserve.outputs import ScoringRequestOutput
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.scoring import PairFields, RerankRequest

__all__ = ["Rerank", "Scoring"]


@attrs.frozen(eq=False)
class Scoring:
    """The handler of /score."""

    _requests: PoolingRequests

    async def create(self) -> Response:
        request, head = await self._requests.receive(SCORE_READER, "score")
        assert request.names is not None, "the reader has seen to it"
        queries, documents = map(request.side, request.names)
        with _naming(self._requests, *request.names, len(queries)):
            outputs = await _score(self._requests, request, queries, documents, head)
        answer = ScoreList(
            id=head.id,
            created=head.created,
            model=head.model,
            data=[Score(index=index, score=output.outputs.score) for index, output in enumerate(outputs)],
            usage=_usage(outputs),
        )
        return json_reply(answer)


@attrs.frozen(eq=False)
class Rerank:
    """The handler of /rerank."""

    _requests: PoolingRequests

    async def create(self) -> Response:
        request, head = await self._requests.receive(RERANK_READER, "rerank")
        documents = [plain_text(document) for document in request.documents]
        with _naming(self._requests, "query", "documents", 1):
            outputs = await _score(self._requests, request, [plain_text(request.query)], documents, head)
        results = _ranked(request, documents, [output.outputs.score for output in outputs])
        return json_reply(Ranking(id=head.id, model=head.model, usage=_usage(outputs), results=results))


@contextmanager
def _naming(requests: PoolingRequests, queries: str, documents: str, num_queries: int) -> Iterator[None]:
    """Errors of a text name the field that held it, and its number there; of a pair, at which a cross-encoder
    looks as a whole, that of the document."""
    are_pairs = scoring_task(requests.llm.model) == "classify"

    def name(index: int) -> str:
        if are_pairs or index >= num_queries:
            return f"{documents}[{index if are_pairs else index - num_queries}]"
        return queries if num_queries == 1 else f"{queries}[{index}]"

    with naming_prompts(documents, name):
        yield


def _ranked(request: RerankRequest, documents: Sequence[str], scores: Sequence[float]) -> list[Ranked]:
    """Of equal ones the first comes first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        Ranked(
            index=index,
            document=None if request.return_documents is False else RankedDocument(documents[index]),
            relevance_score=scores[index],
        )
        for index in order[: request.top_n or None]
    ]


def _usage(outputs: Sequence[ScoringRequestOutput]) -> PromptUsage:
    """Of tokens that were computed: a query that is embedded for many documents is so once."""
    return PromptUsage.of(sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs))


async def _score(
    requests: PoolingRequests,
    request: PairFields,
    queries: Sequence[str],
    documents: Sequence[str],
    head: ReplyHead,
) -> list[ScoringRequestOutput]:
    """One result per pair; raises as `PoolingRequests.pool` does."""
    llm = requests.llm
    llm.check_room(len(documents))
    truncation = request.truncation(llm.model.max_model_len)
    queries = await requests.beginnings(queries, request.max_tokens_per_query)
    documents = await requests.beginnings(documents, request.max_tokens_per_doc)
    return await llm.score(
        [TextPrompt(text, truncation=truncation) for text in queries],
        [TextPrompt(text, truncation=truncation) for text in documents],
        PoolingParams(use_activation=request.use_activation),
        request_id=head.id,
        priority=request.priority or 0,
    )
