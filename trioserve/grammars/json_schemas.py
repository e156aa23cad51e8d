"""JSON schemas, and what is around their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from llguidance import LLMatcher

from trioserve.grammars.refusals import refusal

if TYPE_CHECKING:
    from trioserve.config import StructuredOutputsConfig
    from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["JsonStyle", "json_grammar"]

_WHITESPACE = r"\x20|\x0A[\x20\x09]{0,64}"
"""Between two tokens: a space, or a line break and its indentation. JSON allows more, but small models like
to go on with blank lines for ever, and every choice less is a token more that is computed ahead."""

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is no schema, though it may look like one."""


@attrs.frozen
class JsonStyle:
    """How JSON is to be written, beyond its schema."""

    whitespace_pattern: str | None
    """Matched at most once between two tokens; None: no whitespace at all."""
    closes_objects: bool
    """Objects have no properties but those that the schema names, unless it says otherwise."""

    @classmethod
    def of(cls, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> JsonStyle:
        compact = params.disable_any_whitespace or config.disable_any_whitespace
        return cls(
            None if compact else params.whitespace_pattern or _WHITESPACE,
            params.disable_additional_properties or config.disable_additional_properties,
        )

    def apply(self, schema: object) -> dict[str, Any]:
        """The schema with this style in it, in llguidance's terms.

        Raises:
          InvalidRequestError: nothing can match it, or it is no schema.
        """
        if schema is True:
            schema = {}
        if schema is False:
            raise refusal("no value matches the schema false.")
        if not isinstance(schema, dict):
            raise refusal(f"a JSON schema is an object, not {type(schema).__name__}.")
        if self.closes_objects:
            schema = _closed(schema)
        own = schema.get("x-guidance")
        options = {"whitespace_flexible": False, "whitespace_pattern": self.whitespace_pattern}
        return {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **options}}


def json_grammar(schema: object, style: JsonStyle) -> str:
    """Raises InvalidRequestError: see `JsonStyle.apply`."""
    return LLMatcher.grammar_from_json_schema(style.apply(schema))


def _closed(schema: dict[str, Any], *, is_part: bool = False) -> dict[str, Any]:
    """With additionalProperties false in all objects that have properties.

    is_part: of an allOf. There it would forbid what the other parts require.
    """
    closed = {key: value if key in _DATA else _closed_inside(key, value) for key, value in schema.items()}
    names_properties = isinstance(schema.get("properties"), dict) or "patternProperties" in schema
    if names_properties and not is_part and "allOf" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _closed_inside(key: str, value: object) -> object:
    if isinstance(value, dict):
        if key in {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}:
            return {name: _closed_inside("", schema) for name, schema in value.items()}
        return _closed(value)
    if isinstance(value, list):
        is_part = key == "allOf"
        return [_closed(item, is_part=is_part) if isinstance(item, dict) else item for item in value]
    return value
