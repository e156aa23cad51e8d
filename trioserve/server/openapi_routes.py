"""What the description says of each route. A new API adds its routes here; its types speak for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from trioserve.server.protocol.completions import Completion, CompletionChunk
from trioserve.server.protocol.errors import ErrorResponse
from trioserve.server.protocol.models import ModelCard, ModelList
from trioserve.server.protocol.readers import CHAT_READER, COMPLETION_READER
from trioserve.server.protocol.reading import RequestReader

__all__ = ["ROUTES", "Body", "Route"]


@attrs.frozen
class Body:
    """What an answer may be."""

    media_type: str
    kind: Any
    """An attrs class or a union of them, of a stream those of its events; or a schema, as a dict."""
    ends_with_done: bool = False
    """The data of a stream's last event is `[DONE]`."""

    @classmethod
    def json(cls, kind: Any) -> Body:
        return cls("application/json", kind)

    @classmethod
    def events(cls, kind: Any, *, ends_with_done: bool = True) -> Body:
        """A stream whose events are those of `kind`, or the route's error."""
        return cls("text/event-stream", kind, ends_with_done)


@attrs.frozen(kw_only=True)
class Route:
    path: str
    method: str
    operation_id: str
    summary: str
    answers: Mapping[int, tuple[Body, ...]]
    """Status -> what may come with it."""
    failures: frozenset[int] = frozenset()
    """Statuses that come with an error object, beside those that any route may have."""
    error: type = ErrorResponse
    """The error object: that of OpenAI's API, or of the API that the route belongs to."""
    reader: RequestReader[Any] | None = None
    """Of the request's body."""
    parameters: tuple[Mapping[str, Any], ...] = ()


_TEXT = Body("text/plain", {"type": "string"})
_EMPTY = Body("text/plain", {"type": "string", "maxLength": 0})
_VERSION = Body.json(
    {"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}
)
_HEALTH: Mapping[int, tuple[Body, ...]] = {200: (_EMPTY,), 503: (_EMPTY,)}

_GENERATION_FAILURES = frozenset({404, 408, 413, 415, 429, 503, 504})

_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _generation(name: str, summary: str, reader: RequestReader[Any], whole: type, chunk: type) -> Route:
    return Route(
        path=f"/v1/{name}",
        method="post",
        operation_id="create_" + name.replace("/", "_").removesuffix("s"),
        summary=summary,
        answers={200: (Body.json(whole), Body.events(chunk))},
        failures=_GENERATION_FAILURES,
        reader=reader,
    )


def _get(path: str, operation_id: str, summary: str, *bodies: Body, **more: Any) -> Route:
    return Route(
        path=path,
        method="get",
        operation_id=operation_id,
        summary=summary,
        answers=more.pop("answers", None) or {200: bodies},
        **more,
    )


ROUTES = (
    _generation(
        "chat/completions", "Go on with a conversation", CHAT_READER, ChatCompletion, ChatCompletionChunk
    ),
    _generation("completions", "Go on with a text", COMPLETION_READER, Completion, CompletionChunk),
    _get("/v1/models", "list_models", "The names that the model is served under", Body.json(ModelList)),
    _get(
        "/v1/models/{model}", "retrieve_model", "One of them", Body.json(ModelCard),
        failures=frozenset({404}), parameters=(_MODEL,),
    ),
    _get("/health", "health", "Does the engine answer?", answers=_HEALTH),
    _get("/health/live", "live", "Is the engine not dead for good?", answers=_HEALTH),
    _get(
        "/health/ready", "ready", "Does the engine answer, and the server take requests?", _EMPTY,
        failures=frozenset({503}),
    ),
    _get("/ping", "ping", "As /health", answers=_HEALTH),
    Route(path="/ping", method="post", operation_id="post_ping", summary="As /health", answers=_HEALTH),
    _get("/metrics", "metrics", "Prometheus metrics", _TEXT),
    _get("/version", "version", "The server's version", _VERSION),
    _get("/openapi.json", "describe", "This description", Body.json({"type": "object"})),
)  # fmt: skip
