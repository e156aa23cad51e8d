"""What is right of an answer: what `/openapi.json` says of its route, and what OpenAI's own description says
where the route is one of OpenAI's. JSON and every event of a stream is looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import attrs
import jsonschema_rs

from openai_schemas import check_openai, check_schema
from trioserve.server.openapi import Description
from trioserve.server.openapi_routes import ROUTES
from trioserve.server.protocol.anthropic_answers import AnthropicErrorResponse
from trioserve.server.protocol.errors import ErrorResponse

__all__ = ["NOWHERE", "NOWHERE_OF_ANTHROPIC", "Answer", "Operation", "WrongAnswerError", "operations"]


class WrongAnswerError(Exception):
    """An answer is not as described."""


@attrs.frozen
class Operation:
    """What is described of a route."""

    method: str
    path: str
    """A template, such as `/v1/models/{model}`."""
    responses: Mapping[str, Any]
    is_openai: bool = True
    """Its errors are OpenAI's."""


NOWHERE = Operation("", "", {})
"""There is no such route, or not with this method."""

NOWHERE_OF_ANTHROPIC = Operation("", "", {}, is_openai=False)
"""The same, below the paths of Anthropic's API."""


@cache
def operations() -> Mapping[tuple[str, str], Operation]:
    """By method, in small letters, and path."""
    return {
        (route.method, route.path): Operation(
            route.method,
            route.path,
            _document()["paths"][route.path][route.method]["responses"],
            route.error is ErrorResponse,
        )
        for route in ROUTES
    }


@cache
def _document() -> Any:
    return _closed(Description(ROUTES, needs_key=True, open_paths=()).document())


def _closed(part: Any) -> Any:
    """The description for those who want to hear of every key: an object has no others."""
    if isinstance(part, list):
        return [_closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    changed = {key: _closed(value) for key, value in part.items()}
    if part.get("type") == "object" and isinstance(part.get("properties"), dict):
        changed.setdefault("additionalProperties", False)
    return changed


@cache
def _validator(schema: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(
        {"allOf": [json.loads(schema)], "components": _document()["components"]}
    )


def _narrowed(schema: Any, value: Any) -> Any:
    """Of a union, the part that has the type of `value`, if there is one: its errors say more."""
    tag = value.get("type") if isinstance(value, dict) else None
    for part in schema.get("anyOf", ()) if tag is not None else ():
        component = _document()["components"]["schemas"][part.get("$ref", "").rpartition("/")[2]]
        if tag in component["properties"].get("type", {}).get("enum", ()):
            return part
    return schema


def _error(*, is_openai: bool) -> Any:
    kind = ErrorResponse if is_openai else AnthropicErrorResponse
    return {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}


@attrs.define
class Answer:
    """An answer, checked while it comes."""

    operation: Operation
    status: int
    media_type: str
    """Without parameters."""
    _rest: bytes = b""
    """What is not yet checked."""
    _last: str | None = None
    """The data of the last event."""

    def take(self, part: bytes) -> None:
        """A part of the body. Raises WrongAnswerError if it ends a wrong event."""
        self._rest += part
        if self.media_type == "text/event-stream":
            *frames, self._rest = self._rest.split(b"\n\n")
            for frame in frames:
                self._take_frame(frame.decode())

    def end(self) -> None:
        """The body is whole. Raises WrongAnswerError if it is wrong."""
        described = self._described()
        if self.media_type == "text/event-stream":
            self._check(not self._rest, "the stream ends within an event")
            is_done = self._last == "[DONE]"
            self._check(is_done == described["x-ends-with-done"], f"the last event is {self._last}")
        elif self.media_type == "application/json":
            value = json.loads(self._rest)
            is_error = self.status >= 400
            self._check_value(value, described["schema"], is_event=False, is_error=is_error)

    def _take_frame(self, frame: str) -> None:
        """The lines of an event: WHATWG HTML, section 9.2.6."""
        lines = [line.partition(": ") for line in frame.split("\n") if not line.startswith(":")]
        if not lines:
            return
        self._check(self._last != "[DONE]", "an event follows [DONE]")
        fields = {name: value for name, _, value in lines}
        is_frame = len(fields) == len(lines) and "data" in fields and fields.keys() <= {"event", "data"}
        self._check(is_frame, f"an event is {frame!r}")
        self._last = fields["data"]
        if self._last == "[DONE]":
            return
        event = json.loads(self._last)
        if "event" in fields:
            self._check(event.get("type") == fields["event"], f"{fields['event']} is the event of {event}")
        schema = self._described()["x-event-schema"]
        self._check_value(event, schema, is_event=True, is_error=event.keys() == {"error"})

    def _described(self) -> Mapping[str, Any]:
        """What is said of answers of this status and media type."""
        if not self.operation.responses:
            self._check(self.status >= 400, "there is no such route")
            return _error(is_openai=self.operation.is_openai)
        contents = self.operation.responses.get(str(self.status), {}).get("content", {})
        self._check(self.media_type in contents, "the description says nothing of such answers")
        described: Mapping[str, Any] = contents[self.media_type]
        return described

    def _check_value(self, value: Any, schema: Any, *, is_event: bool, is_error: bool) -> None:
        with self._naming(value):
            _validator(json.dumps(_narrowed(schema, value))).validate(value)
            if not is_error:
                check_openai(self.operation.method, self.operation.path, value, is_event=is_event)
            elif self.operation.is_openai:
                check_schema("ErrorResponse", value)

    @contextmanager
    def _naming(self, value: Any) -> Iterator[None]:
        try:
            yield
        except jsonschema_rs.ValidationError as error:
            raise WrongAnswerError(f"{self._name}: {error}\n\nin {json.dumps(value)[:2000]}") from None

    def _check(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise WrongAnswerError(f"{self._name}: {text}")

    @property
    def _name(self) -> str:
        return f"{self.operation.method} {self.operation.path} {self.status} {self.media_type}"
