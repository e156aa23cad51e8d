"""Arguments as Qwen3-Coder writes them: `<parameter=city>Paris</parameter></function>`.

Nothing in the text tells 3 from "3": the function's schema does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import regex

from trioserve.parsers.held_back import split_before
from trioserve.parsers.to_json import escaped, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["XmlArguments"]

_BEGIN = regex.compile(r"\s{0,64}+(?:<parameter=(?P<name>[^<>\n]{1,256})>|(?P<end></function>))")
_END = regex.compile(r"\n?</parameter>")

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What models write who think of Python."""


class XmlArguments:
    """Parameters up to the end of the function. A line break at either end of a value is not part of it.

    A string is passed on as it comes, any other value once it is whole. What stands between parameters and is
    none ends the arguments: it is left to whoever reads on.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.rest: str | None = None
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._held = ""
        self._written = 0
        self._kinds: frozenset[str] | None = None
        """Of the value at hand; None: between parameters."""
        self._value: list[str] = []
        """Of it, where it is no mere string."""
        self._is_at_start = False

    def feed(self, text: str) -> str:
        self._held += text
        fragments = []
        while self.rest is None:
            fragment = self._read_parameter() if self._kinds is None else self._read_value()
            if fragment is None:
                break
            fragments.append(fragment)
        return "".join(fragments)

    def _read_parameter(self) -> str | None:
        found = _BEGIN.match(self._held, partial=True)
        if found is not None and found.partial:
            return None
        if found is None or found["end"]:
            self.rest, self._held = self._held[found.end() if found else 0 :], ""
            return "}" if self._written else "{}"
        self._held = self._held[found.end() :]
        self._kinds = _kinds_of(self._properties.get(found["name"]))
        self._value, self._is_at_start = [], True
        self._written += 1
        begin = f"{'{' if self._written == 1 else ', '}{to_json(found['name'])}: "
        return begin + ('"' if self._is_string else "")

    @property
    def _is_string(self) -> bool:
        return self._kinds == frozenset({"string"})

    def _read_value(self) -> str | None:
        """None where there is nothing more to be made of what is there."""
        if self._is_at_start and self._held:
            self._held, self._is_at_start = self._held.removeprefix("\n"), False
        text, mark, self._held = split_before(_END, self._held)
        if mark is None:
            return self._take(text) if text else None
        fragment = self._take(text) + self._end_value()
        self._kinds = None
        return fragment

    def _take(self, text: str) -> str:
        if self._is_string:
            return escaped(text)
        self._value.append(text)
        return ""

    def _end_value(self) -> str:
        return '"' if self._is_string else _value_json("".join(self._value), self._kinds or frozenset())


def _kinds_of(schema: Any) -> frozenset[str]:
    """JSON types that a value may have, as far as the schema says; "string" where it says nothing."""
    return frozenset(_kinds(schema)) or frozenset({"string"})


def _kinds(schema: Any) -> Iterable[str]:
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    yield from (name for name in [kind, *_list(kind)] if isinstance(name, str))
    if "const" in schema:
        yield _kind_of(schema["const"])
    yield from map(_kind_of, _list(schema.get("enum")))
    for keyword in ("anyOf", "oneOf", "allOf"):
        for member in _list(schema.get(keyword)):
            yield from _kinds(member)
    if "$ref" in schema:
        yield from ("object", "array", "string")


def _list(value: Any) -> list[Any]:
    """Schemas are the client's: not all that should be a list is one."""
    return value if isinstance(value, list) else []


def _kind_of(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def _value_json(text: str, kinds: frozenset[str]) -> str:
    """The text itself, if it is JSON of one of these types; else a string of it."""
    bare = _PYTHON.get(text.strip(), text.strip())
    try:
        kind = _kind_of(json.loads(bare, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return to_json(text)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return bare if fits and kind != "string" else to_json(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
