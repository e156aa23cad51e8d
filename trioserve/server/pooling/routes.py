"""The routes of models that pool: OpenAI's, Cohere's and Jina's, and vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.server.pooling.classification import Classify
from trioserve.server.pooling.cohere import CohereEmbed
from trioserve.server.pooling.requests import PoolingRequests
from trioserve.server.pooling.scores import Rerank, Scoring
from trioserve.server.pooling.vectors import Embeddings, Pooling
from trioserve.tasks import POOLING_TASKS

if TYPE_CHECKING:
    from trioserve.server.model_routes import Handler, ModelRoutes
    from trioserve.server.turns import Turns
    from trioserve.tasks import Task

__all__ = ["add_pooling"]


def add_pooling(routes: ModelRoutes, turns: Turns) -> None:
    """All are behind the door."""
    requests = PoolingRequests(turns)
    embeddings, pooling, classify = Embeddings(requests), Pooling(requests), Classify(requests)
    scoring, rerank, cohere = Scoring(requests), Rerank(requests), CohereEmbed(requests)
    _add(routes, "/v1/embeddings", embeddings.create, "embeddings", "embed")
    _add(routes, "/v2/embed", cohere.create, "cohere_embed", "embed")
    _add(routes, "/pooling", pooling.create, "pooling", *POOLING_TASKS)
    _add(routes, "/classify", classify.create, "classify", "classify")
    for version in ("", "/v1"):
        _add(routes, f"{version}/score", scoring.create, f"score{version.replace('/', '_')}", "score")
    for version in ("", "/v1", "/v2"):
        _add(routes, f"{version}/rerank", rerank.create, f"rerank{version.replace('/', '_')}", "score")
    if routes.service.has_task("score"):
        _invoke(routes, rerank.create, "query")
        _invoke(routes, scoring.create, "queries", "data_1", "text_1")
    if routes.service.has_task(*POOLING_TASKS):
        _invoke(routes, pooling.create, "task")
    if routes.service.has_task("embed"):
        _invoke(routes, cohere.create, "texts", "inputs")
        _invoke(routes, embeddings.create, "input", "messages")
    elif routes.service.has_task("classify"):
        _invoke(routes, classify.create, "input", "messages")
    elif routes.service.has_task(*POOLING_TASKS):
        _invoke(routes, pooling.create, "input", "messages")


def _add(routes: ModelRoutes, path: str, handler: Handler, endpoint: str, *tasks: Task) -> None:
    routes.post(path, handler, endpoint=endpoint, tasks=tasks, guarded=True)


def _invoke(routes: ModelRoutes, handler: Handler, *fields: str) -> None:
    """What POST /invocations means by these fields, unless it has another meaning already."""
    for field in fields:
        routes.invocations.setdefault(field, handler)
