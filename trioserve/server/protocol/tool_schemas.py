"""What form an answer has that must be tool calls.

If the request names the function, the answer is the arguments alone. Else it is an array of

    {"name": "get_weather", "arguments": {"city": "Paris"}}

which is how most models that know tools were taught to write a call. The keys come in this order: a grammar
made of a schema keeps to the order of its properties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.server.protocol.tools import FunctionDefinition

__all__ = ["MAX_CALLS", "arguments_form", "arguments_schema", "calls_form", "can_be_closed", "closes_objects"]

MAX_CALLS = 16
"""In one answer: some models would never close the array."""

_NO_PARAMETERS = {"type": "object", "properties": {}}

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is no schema, though it may look like one."""

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has schemas by name."""

_OTHER_PLACES = frozenset({"$ref", "anyOf", "oneOf", "if", "dependentSchemas", "minProperties"})


def arguments_form(function: FunctionDefinition) -> StructuredOutputsParams:
    """Of an answer that is this function's arguments.

    Raises:
      InvalidRequestError: the schema is too large or too deep; of `json`.
    """
    return _form(arguments_schema(function), [function])


def calls_form(functions: Sequence[FunctionDefinition], *, max_calls: int) -> StructuredOutputsParams:
    """Of an answer that is an array of 1 to `max_calls` calls of these functions.

    Raises as `arguments_form` does.
    """
    definitions = {
        function.name: _rebased(arguments_schema(function), f"#/$defs/{function.name}")
        for function in functions
    }
    calls = {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": {"anyOf": [_call(function.name) for function in functions]},
        "$defs": definitions,
    }
    return _form(calls, functions)


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    return {**(function.parameters or _NO_PARAMETERS), "type": "object"}


def _form(schema: dict[str, Any], functions: Sequence[FunctionDefinition]) -> StructuredOutputsParams:
    if not any(function.strict for function in functions):
        # llguidance passes over what it cannot enforce. Schemas of tools are made by many frameworks, and say
        # more than any grammar can.
        schema = {**schema, "x-guidance": {"lenient": True}}
    return StructuredOutputsParams(json=schema, disable_additional_properties=closes_objects(functions))


def closes_objects(functions: Sequence[FunctionDefinition]) -> bool:
    """A function takes the parameters that it names."""
    return all(can_be_closed(function.parameters or {}) for function in functions)


def can_be_closed(schema: dict[str, Any]) -> bool:
    """Its objects may be held to the properties that they name. Where these are in several places, each would
    forbid those of the others; and some schemas require properties that they do not name."""
    return not _needs_others(schema)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _needs_others(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_needs_others, value))
    if not isinstance(value, dict):
        return False
    if "properties" in value and not _OTHER_PLACES.isdisjoint(value):
        return True
    if any(isinstance(part, dict) and "$ref" in part for part in _listed(value.get("allOf"))):
        return True
    required, named = value.get("required"), value.get("properties")
    if isinstance(named, dict) and not set(map(str, _listed(required))) <= named.keys():
        return True
    return any(map(_needs_others, value.values()))


def _rebased(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """The schema as a part of another one, at `base`: its references to itself are from there now."""
    if "$id" in schema:  # then it is a resource of its own, wherever it is
        return schema
    return {key: _rebased_value(key, value, base) for key, value in schema.items()}


def _rebased_value(key: str, value: Any, base: str) -> Any:
    if key in _DATA:
        return value
    if key == "$ref" and isinstance(value, str):
        return base + value[1:] if value == "#" or value.startswith("#/") else value
    if isinstance(value, list):
        return [_rebased(item, base) if isinstance(item, dict) else item for item in value]
    if not isinstance(value, dict):
        return value
    if key in _MAPS:
        return {name: _rebased_value("", schema, base) for name, schema in value.items()}
    return _rebased(value, base)
