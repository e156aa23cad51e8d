"""What form the output of a request must have."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.json_values import MAX_DEPTH, is_flat
from trioserve.text import is_unicode
from trioserve.validators import boolean, plain, reject

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StructuredOutputsParams"]


_MAX_SIZE = 2**20
"""Bytes. The core, too, takes them apart, some 10 ms for a schema of that size."""


def _to_json(value: Any) -> Any:
    """Of objects the JSON; a string is taken for JSON already."""
    if value is None or isinstance(value, str):
        return plain(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return value  # for the validator to refuse


def _optional_text(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not (isinstance(value, str) and value):
        raise reject(attribute, value, "a non-empty string")
    _check_size(attribute, [value])


def _check_size(attribute: attrs.Attribute[Any], texts: Sequence[str]) -> None:
    """Before anything is parsed, which may take much longer than counting."""
    size = len(texts) + sum(map(len, texts))
    if size <= _MAX_SIZE:
        for text in texts:
            if not is_unicode(text):
                raise reject(attribute, text, "text without halves of characters")
            size += len(text.encode()) - len(text)
    if size > _MAX_SIZE:
        raise InvalidRequestError(
            f"{attribute.name} must be at most {_MAX_SIZE} bytes, got {size}.", parameter=attribute.name
        )


def _json_schema(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    schema = None
    if isinstance(value, str):
        _check_size(attribute, [value])
        with contextlib.suppress(ValueError, RecursionError):
            schema = json.loads(value)
    if not isinstance(schema, dict | bool):
        raise reject(attribute, value, "a JSON schema: an object, or JSON of one")
    if not is_flat(schema):
        raise reject(attribute, value, f"nested at most {MAX_DEPTH} deep")


def _to_choices(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def _choices(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not (isinstance(value, tuple) and value and all(isinstance(choice, str) for choice in value)):
        raise reject(attribute, value, "a non-empty list of strings")
    _check_size(attribute, value)


_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@attrs.frozen(kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first six is given; the output matches it from its first to its last character.

    None may be larger than 1 MiB, and a schema not be nested more than 64 deep. Whether it can be used is
    found out by the engine."""

    json: str | None = attrs.field(default=None, converter=_to_json, validator=_json_schema)
    """A JSON schema, as JSON or as the object itself."""
    json_object: bool = attrs.field(default=False, validator=boolean)
    """Any JSON object."""
    regex: str | None = attrs.field(default=None, converter=plain, validator=_optional_text)
    choice: tuple[str, ...] | None = attrs.field(default=None, converter=_to_choices, validator=_choices)
    """One of these strings."""
    grammar: str | None = attrs.field(default=None, converter=plain, validator=_optional_text)
    """A context-free grammar in Lark's or GBNF's notation."""
    structural_tag: str | None = attrs.field(default=None, converter=_to_json, validator=_optional_text)
    """JSON: free text, in which after certain triggers a schema must be followed (as in vLLM)."""
    disable_any_whitespace: bool = attrs.field(default=False, validator=boolean)
    """JSON without any whitespace between its tokens."""
    disable_additional_properties: bool = attrs.field(default=False, validator=boolean)
    """Objects have no properties but those that the schema names, unless it says otherwise."""
    free_until: str | None = attrs.field(default=None, converter=plain, validator=_optional_text)
    """The output has the form only after this mark. Up to it, and to white space behind it, it is free."""
    free_from: str | None = attrs.field(default=None, converter=plain, validator=_optional_text)
    """With `free_until`: the mark with which the free text begins, if there is any."""
    whitespace_pattern: str | None = attrs.field(default=None, converter=plain, validator=_optional_text)
    """A regular expression of the whitespace between JSON's tokens; None: a space, or a line break and its
    indentation. There may always be none at all."""

    def __attrs_post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in {None, False}]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs must have exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(given) or 'none'}.",
                parameter="structured_outputs",
            )
        if self.free_from is not None and self.free_until is None:
            raise InvalidRequestError(
                f"free_from must be null without free_until, got {self.free_from!r}.", parameter="free_from"
            )
