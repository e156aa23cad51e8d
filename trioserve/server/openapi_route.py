"""What is said of a route, for the description of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.server.protocol.errors import ErrorResponse
from trioserve.server.protocol.reading import RequestReader

__all__ = ["GENERATION_FAILURES", "Body", "Route"]

GENERATION_FAILURES = frozenset({404, 408, 413, 415, 429, 503, 504})
"""Statuses of what costs the engine work."""


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
    flag: str | None = None
    """The field of `ServerArgs` without which there is no such route."""
    reader: RequestReader[Any] | tuple[RequestReader[Any], ...] | None = None
    """Of the request's body; where it may be one of several kinds, of each."""
    file: str | None = None
    """The body is a form: this field is a file, the reader's are texts beside it."""
    parameters: tuple[Mapping[str, Any], ...] = ()
    links: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    """The operations that go on from a good answer: id -> parameter -> its place there (RFC 6901)."""
