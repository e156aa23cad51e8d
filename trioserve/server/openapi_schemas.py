"""JSON Schemas of the protocol's attrs classes.

msgspec and cattrs describe attrs classes too, but know neither unions of several lists (as `prompt` has) nor
the ranges that our own readers enforce.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs
from msgspec import UnsetType

from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.validators import Check

__all__ = ["Schema", "SchemaWriter"]

Schema = dict[str, Any]

_SCALARS: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    bytes: "string",  # base64
    type(None): "null",
}

_CONTAINERS: Mapping[Any, tuple[str, str]] = {
    list: ("array", "items"),
    tuple: ("array", "items"),
    Sequence: ("array", "items"),
    dict: ("object", "additionalProperties"),
    Mapping: ("object", "additionalProperties"),
}

_TAGS = {"type", "object"}
"""Keys that say what an answer is: where they have a default, they have no other value."""

_HOLDS_JSON: Mapping[str, Schema] = {
    "json": {"type": ["string", "object", "boolean", "null"]},
    "structural_tag": {},
}
"""Fields of StructuredOutputsParams that hold JSON as text, and take the value itself as well."""


class SchemaWriter:
    """Collects the schemas of classes, each under its name."""

    def __init__(self) -> None:
        self.components: dict[str, Schema] = {}
        self._names: dict[tuple[type, bool], str] = {}
        """(class, whether we read it) -> its name among the components."""

    def response(self, kind: Any) -> Schema:
        """The schema of `kind`, which we write: its keys are all there, but for those that may be unset.

        `kind` is an attrs class, a union of them, or a schema, which stays as it is.
        """
        return dict(kind) if isinstance(kind, Mapping) else self._type(kind, is_request=False)

    def request(
        self, kind: type, refine: Mapping[str, Mapping[str, Any]], others: Mapping[str, Schema]
    ) -> Schema:
        """A reference to `kind`, which we read: keys without a default must be there, others are ignored.

        `refine` are keywords for some of its fields, `others` are fields that the class does not have.
        """
        reference = self._reference(kind, is_request=True)
        properties = self.components[self._names[kind, True]]["properties"]
        for name, keywords in refine.items():
            properties[name] = _merge(properties[name], keywords)
        properties.update({name: schema for name, schema in others.items() if name not in properties})
        return reference

    def _reference(self, kind: type, *, is_request: bool) -> Schema:
        name = self._names.get((kind, is_request))
        if name is None:
            name = self._names[kind, is_request] = self._new_name(kind, is_request)
            self.components[name] = {}  # it may refer to itself
            self.components[name] = self._describe(kind, is_request)
        return {"$ref": f"#/components/schemas/{name}"}

    def _new_name(self, kind: type, is_request: bool) -> str:
        """That of the class; what has the same name in another module or direction gets a longer one."""
        module = kind.__module__.rpartition(".")[2].title().replace("_", "")
        plain = kind.__name__
        direction = "Input" if is_request else "Output"
        names = (plain, plain + direction, module + plain, module + plain + direction)
        return next(name for name in names if name not in self.components)

    def _describe(self, kind: type, is_request: bool) -> Schema:
        hints = get_type_hints(kind)
        properties: dict[str, Schema] = {}
        required = []
        for field in attrs.fields(kind):
            properties[field.name] = self._field(kind, field, hints[field.name], is_request)
            if not is_request and field.name in _TAGS and isinstance(field.default, str):
                properties[field.name] = {"type": "string", "enum": [field.default]}
            if field.default is attrs.NOTHING or not (is_request or _may_be_unset(hints[field.name])):
                required.append(field.name)
        schema: Schema = {"type": "object", "properties": properties}
        if required:
            schema["required"] = required
        if kind is StructuredOutputsParams:
            schema["additionalProperties"] = False
        if (text := kind.__doc__) and not text.startswith("Method generated"):
            schema["description"] = inspect.cleandoc(text)
        return schema

    def _field(self, kind: type, field: attrs.Attribute[Any], hint: Any, is_request: bool) -> Schema:
        if kind is StructuredOutputsParams:  # it reads itself: see `protocol.reading`
            if field.name in _HOLDS_JSON:
                return _HOLDS_JSON[field.name]
            hint |= None
        schema = self._type(hint, is_request)
        return _merge(schema, field.validator.schema) if isinstance(field.validator, Check) else schema

    def _type(self, hint: Any, is_request: bool) -> Schema:
        origin = get_origin(hint) or hint
        arguments = [part for part in get_args(hint) if part is not UnsetType and part is not Ellipsis]
        if origin in {Union, types.UnionType}:
            return _either([self._type(part, is_request) for part in arguments])
        if origin is Literal:
            return {"type": _SCALARS[type(arguments[0])], "enum": arguments}
        if attrs.has(origin):
            return self._reference(origin, is_request=is_request)
        if origin in _CONTAINERS:
            kind, items = _CONTAINERS[origin]
            return {"type": kind, items: self._type(arguments[-1], is_request)}
        return {} if origin is Any else {"type": _SCALARS[origin]}


def _may_be_unset(hint: Any) -> bool:
    return UnsetType in get_args(hint)


def _either(schemas: list[Schema]) -> Schema:
    """One of these. Where only one of them says more than its type, that may be said in one schema."""
    if {} in schemas:
        return {}
    telling = [schema for schema in schemas if schema.keys() != {"type"}]
    if len(schemas) == 1:
        return schemas[0]
    if len(telling) > 1 or any("type" not in schema or "enum" in schema for schema in telling):
        return {"anyOf": schemas}
    merged = telling[0] if telling else {}
    return merged | {"type": [schema["type"] for schema in schemas]}


_PLACES = {
    "minimum": {"integer", "number"},
    "maximum": {"integer", "number"},
    "exclusiveMinimum": {"integer", "number"},
    "minLength": {"string"},
    "maxLength": {"string"},
    "minItems": {"array"},
    "maxItems": {"array"},
    "items": {"array"},
    "maxProperties": {"object"},
    "propertyNames": {"object"},
    "enum": {"string", "integer", "number", "boolean", "null", "array", "object"},
}
"""Keyword -> the types that it is about."""


def _merge(schema: Schema, keywords: Mapping[str, Any]) -> Schema:
    """`schema`, with those of the keywords that are about its types, also within alternatives and items."""
    if "anyOf" in schema:
        return {"anyOf": [_merge(part, keywords) for part in schema["anyOf"]]}
    named = schema.get("type", ())
    kinds = {named} if isinstance(named, str) else set(named)
    merged = dict(schema)
    for keyword, value in keywords.items():
        if not _PLACES[keyword] & kinds:
            continue
        merged[keyword] = _merge(schema.get("items", {}), value) if keyword == "items" else value
    return merged
