"""What OpenAI's own description says of answers, and where we differ from it.

The schemas in `data/openai_schemas.json` are OpenAI's (MIT), cut out by `extract_openai_schemas.py`.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs

__all__ = ["check_openai", "check_schema", "openai_schema"]

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_CHUNK = "CompletionChunk"

_ALLOWED: tuple[tuple[str, str, Schema, str], ...] = (
    (
        "Embedding", "embedding", {"type": "string"},
        "base64, which requests may ask for, as OpenAI's own client does",
    ),
    (
        "Response", "usage", _NULL,
        "not known before the end; OpenAI's API says null too, and other descriptions demand the key",
    ),
    (
        "CreateChatCompletionResponse", "choices.*.finish_reason", {"const": "repetition"},
        "vLLM's: the answer said the same again and again",
    ),
    (
        "CreateChatCompletionStreamResponse", "choices.*.finish_reason", {"const": "repetition"},
        "the same",
    ),
    ("CreateCompletionResponse", "choices.*.finish_reason", {"const": "repetition"}, "the same"),
    (
        "CreateCompletionResponse", "choices.*.logprobs.token_logprobs.*", _NULL,
        "nothing comes before the first token of an echo; OpenAI's API says null too",
    ),
    ("CreateCompletionResponse", "choices.*.logprobs.top_logprobs.*", _NULL, "the same"),
    (
        _CHUNK, "choices.*.finish_reason", _NULL,
        "OpenAI has one schema for whole and streamed completions; in a stream a choice has not ended yet",
    ),
    (_CHUNK, "usage", _NULL, "null in all chunks but the last, where usage was asked for"),
)  # fmt: skip
"""(schema, place, what may be there besides, why). A schema that is not OpenAI's begins as the one before."""

_BY_ROUTE = {
    ("post", "/v1/chat/completions"): "CreateChatCompletionResponse",
    ("post", "/v1/completions"): "CreateCompletionResponse",
    ("post", "/v1/embeddings"): "CreateEmbeddingResponse",
    ("post", "/v1/responses"): "Response",
    ("get", "/v1/responses/{response_id}"): "Response",
    ("post", "/v1/responses/{response_id}/cancel"): "Response",
    ("get", "/v1/responses/{response_id}/input_items"): "ResponseItemList",
    ("post", "/v1/responses/input_tokens"): "TokenCountsResource",
    ("get", "/v1/models"): "ListModelsResponse",
    ("get", "/v1/models/{model}"): "Model",
}

_EVENTS_BY_ROUTE = {
    ("post", "/v1/chat/completions"): "CreateChatCompletionStreamResponse",
    ("post", "/v1/completions"): _CHUNK,
    ("post", "/v1/responses"): "ResponseStreamEvent",
    ("get", "/v1/responses/{response_id}"): "ResponseStreamEvent",
}


def openai_schema(method: str, path: str, *, is_event: bool) -> str | None:
    """The name of what OpenAI says of this route's good answers; `path` is a template."""
    return (_EVENTS_BY_ROUTE if is_event else _BY_ROUTE).get((method, path))


def check_openai(method: str, path: str, value: Any, *, is_event: bool = False) -> None:
    """`value` is a good answer of this route by OpenAI's description, or the route is none of OpenAI's.

    Raises:
      jsonschema_rs.ValidationError: it is not.
    """
    name = openai_schema(method, path, is_event=is_event)
    if name is not None:
        check_schema(name, value)


def check_schema(name: str, value: Any) -> None:
    """`value` is what OpenAI describes under this name. Raises as `check_openai`."""
    if name == "ResponseStreamEvent" and isinstance(value, dict):
        name = _events_by_type().get(value.get("type", ""), name)  # its errors say more than those of a union
    _validator(name).validate(value)


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas()}}
    )


@cache
def _schemas() -> dict[str, Schema]:
    text = (Path(__file__).parent / "data" / "openai_schemas.json").read_text()
    schemas: dict[str, Schema] = _as_json_schema(json.loads(text)["components"]["schemas"])
    last = ""
    for name, place, further, _ in _ALLOWED:
        if name not in schemas:
            schemas[name] = copy.deepcopy(schemas[last])
        _allow(schemas[name], place.split("."), further)
        last = name
    return schemas


@cache
def _events_by_type() -> dict[str, str]:
    names = [part["$ref"].rpartition("/")[2] for part in _schemas()["ResponseStreamEvent"]["anyOf"]]
    return {_schemas()[name]["properties"]["type"]["enum"][0]: name for name in names}


def _as_json_schema(schema: Any) -> Any:
    """OpenAI's description is OpenAPI 3.1 and still says `nullable`, which JSON Schema does not know; and it
    says `oneOf` of things that overlap, such as an input message and an output message."""
    if isinstance(schema, list):
        return [_as_json_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {"anyOf" if key == "oneOf" else key: _as_json_schema(part) for key, part in schema.items()}
    if changed.get("nullable") in {True, False} and changed.pop("nullable"):
        return {"anyOf": [changed, _NULL]}
    return changed


def _allow(schema: Schema, place: list[str], further: Schema) -> None:
    """Let what is at this place of `schema` be `further` too; `*` is an item of an array."""
    step, *rest = place
    parts = (schema, *schema.get("anyOf", ()), *schema.get("allOf", ()))
    (holder,) = [part for part in parts if "items" in part or step in part.get("properties", ())]
    inside, key = (holder, "items") if step == "*" else (holder["properties"], step)
    if rest:
        _allow(inside[key], rest, further)
    else:
        inside[key] = {"anyOf": [inside[key], further]}
