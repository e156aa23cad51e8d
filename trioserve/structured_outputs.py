"""What form the output of a request must have."""

from __future__ import annotations

import json
from typing import Any

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.text import is_unicode
from trioserve.validators import boolean, reject

__all__ = ["StructuredOutputsParams"]


def _to_json(value: Any) -> Any:
    """Of objects the JSON; a string is taken for JSON already."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return value  # for the validator to refuse


def _optional_text(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not (isinstance(value, str) and value and is_unicode(value)):
        raise reject(attribute, value, "a non-empty string")


def _json_schema(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict | bool):
        raise reject(attribute, value, "a JSON schema: an object, or JSON of one")


def _to_choices(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _choices(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not (isinstance(value, tuple) and value and all(isinstance(c, str) and is_unicode(c) for c in value)):
        raise reject(attribute, value, "a non-empty list of strings")


_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@attrs.frozen(kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first six is given; the output matches it from its first to its last character."""

    json: str | None = attrs.field(default=None, converter=_to_json, validator=_json_schema)
    """A JSON schema, as JSON or as the object itself."""
    json_object: bool = attrs.field(default=False, validator=boolean)
    """Any JSON object."""
    regex: str | None = attrs.field(default=None, validator=_optional_text)
    choice: tuple[str, ...] | None = attrs.field(default=None, converter=_to_choices, validator=_choices)
    """One of these strings."""
    grammar: str | None = attrs.field(default=None, validator=_optional_text)
    """A context-free grammar in Lark's or GBNF's notation."""
    structural_tag: str | None = attrs.field(default=None, converter=_to_json, validator=_optional_text)
    """JSON: free text, in which after certain triggers a schema must be followed (as in vLLM)."""
    disable_any_whitespace: bool = attrs.field(default=False, validator=boolean)
    """JSON without any whitespace between its tokens."""
    disable_additional_properties: bool = attrs.field(default=False, validator=boolean)
    """Objects have no properties but those that the schema names, unless it says otherwise."""
    whitespace_pattern: str | None = attrs.field(default=None, validator=_optional_text)
    """A regular expression of the whitespace between JSON's tokens."""

    def __attrs_post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in {None, False}]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs must have exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(given) or 'none'}.",
                parameter="structured_outputs",
            )
