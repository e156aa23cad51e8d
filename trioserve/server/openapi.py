"""GET /openapi.json: the API in OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1), for clients and tools.

It is made from what the handlers themselves use: the attrs classes of requests and responses, the ranges that
the readers enforce, the fields that they refuse. What one field's value means for another's is told by errors
only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
from quart import Response

from trioserve.server.openapi_route import Body, Route
from trioserve.server.openapi_schemas import SchemaWriter
from trioserve.server.protocol.refusals import HARMLESS
from trioserve.version import __version__

if TYPE_CHECKING:
    from trioserve.server.openapi_schemas import Schema
    from trioserve.server.protocol.reading import RequestReader

__all__ = ["Description"]

_SECURITY = {
    "ApiKey": {"type": "http", "scheme": "bearer"},
    "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
"""Ways of showing a key; one is enough."""

_REQUEST_ID = {"description": "The request's id", "schema": {"type": "string"}}


@attrs.define(eq=False)
class Description:
    """The description of an application's routes. It is made when it is first asked for, in some 5 ms."""

    _routes: Sequence[Route]
    _needs_key: bool
    _open_paths: Collection[str]
    """Those that need no key all the same."""

    async def tell(self) -> Response:
        return Response(self._encoded, content_type="application/json")

    @cached_property
    def _encoded(self) -> bytes:
        return msgspec.json.encode(self.document())

    def document(self) -> dict[str, Any]:
        """The description itself, as plain data."""
        schemas = SchemaWriter()
        paths: dict[str, dict[str, Any]] = {}
        for route in self._routes:
            paths.setdefault(route.path, {})[route.method] = self._operation(route, schemas)
        components: dict[str, Any] = {"schemas": schemas.components}
        document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": "trioserve", "version": __version__},
            "paths": paths,
            "components": components,
        }
        if self._needs_key:
            components["securitySchemes"] = _SECURITY
            document["security"] = [{name: []} for name in _SECURITY]
        return document

    def _operation(self, route: Route, schemas: SchemaWriter) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "operationId": route.operation_id,
            "summary": route.summary,
            "responses": self._responses(route, schemas),
        }
        if route.parameters:
            operation["parameters"] = list(route.parameters)
        if route.reader is not None:
            readers = route.reader if isinstance(route.reader, tuple) else (route.reader,)
            kinds = [_request_schema(reader, schemas) for reader in readers]
            schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
            content = {"application/json": {"schema": schema}}
            if route.file is not None:
                content = {"multipart/form-data": {"schema": _with_file(schema, route.file)}}
            operation["requestBody"] = {"required": True, "content": content}
        if self._needs_key and route.path in self._open_paths:
            operation["security"] = []
        return operation

    def _responses(self, route: Route, schemas: SchemaWriter) -> dict[str, Any]:
        responses = {
            str(status): _response(route, status, bodies, schemas) for status, bodies in route.answers.items()
        }
        failures = {*route.failures, 400, 500}  # 400: of the request's id
        if self._needs_key and route.path not in self._open_paths:
            failures.add(401)
        error = (Body.json(route.error),)
        for status in sorted(failures - route.answers.keys()):
            responses[str(status)] = _response(route, status, error, schemas)
        return responses


def _response(route: Route, status: int, bodies: Sequence[Body], schemas: SchemaWriter) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "headers": {"X-Request-Id": _REQUEST_ID},
    }
    if bodies:
        response["content"] = {body.media_type: _media_type(route, body, schemas) for body in bodies}
    if route.links and status == HTTPStatus.OK:
        response["links"] = {operation: _link(operation, places) for operation, places in route.links.items()}
    return response


def _link(operation: str, places: Mapping[str, str]) -> dict[str, Any]:
    parameters = {name: f"$response.body#{place}" for name, place in places.items()}
    return {"operationId": operation, "parameters": parameters}


def _media_type(route: Route, body: Body, schemas: SchemaWriter) -> dict[str, Any]:
    """OpenAPI 3.1 cannot describe the events of a stream: they are in an extension."""
    if body.media_type != "text/event-stream":
        return {"schema": schemas.response(body.kind)}
    last = " The last one's is [DONE]." if body.ends_with_done else ""
    return {
        "schema": {"description": f"The data of each event is JSON, as x-event-schema says.{last}"},
        "x-event-schema": schemas.response(body.kind | route.error),
        "x-ends-with-done": body.ends_with_done,
    }


def _with_file(schema: Schema, name: str) -> Schema:
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    return {"allOf": [schema, {"type": "object", "properties": {name: file}, "required": [name]}]}


def _request_schema(reader: RequestReader[Any], schemas: SchemaWriter) -> Schema:
    ranges = {name: getattr(field.validator, "schema", {}) for name, field in reader.ranges.items()}
    refine = {
        name: {**ranges.get(name, {}), **reader.shapes.get(name, {})} for name in {*ranges, *reader.shapes}
    }
    others: dict[str, Schema] = {name: {"description": "Has no effect."} for name in sorted(HARMLESS)}
    for refusal in reader.refusals:
        text = f"Must be {refusal.allowed}: anything else is not supported."
        others[refusal.field] = {"description": text, "enum": [None, *refusal.values]}
    return schemas.request(reader.kind, refine, others)
