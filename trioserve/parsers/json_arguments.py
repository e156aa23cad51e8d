"""JSON objects in text that comes in pieces: where they end, and which of them are calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import regex

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["JsonArguments", "ObjectScanner", "WholeCall", "read_whole_call"]

_MARKS = regex.compile(r'["{}\[\]]|\\.?', regex.DOTALL)
"""All that matters of JSON here. A backslash and what belongs to it are one mark, unless a piece ends between
them."""

_ARGUMENTS_KEYS = ("arguments", "parameters")


class ObjectScanner:
    """Finds the end of an object by its brackets, whatever else is wrong with it."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        """The first character of the next piece belongs to a backslash."""

    def feed(self, text: str) -> int | None:
        """How many characters of the piece belong to the object, once it has ended."""
        if not text:
            return None
        start, self._is_escaped = int(self._is_escaped), False
        for mark in _MARKS.finditer(text, start):
            if mark[0] == '"':
                self._is_in_string = not self._is_in_string
            elif mark[0][0] == "\\":
                self._is_escaped = len(mark[0]) == 1
            elif not self._is_in_string:
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth <= 0:
                    return int(mark.end())
        return None


class JsonArguments:
    """Arguments that are JSON already: the model's own text, character by character."""

    def __init__(self, _schema: Mapping[str, Any]) -> None:
        self._scanner = ObjectScanner()
        self.rest: str | None = None

    def feed(self, text: str) -> str:
        end = self._scanner.feed(text)
        if end is None:
            return text
        self.rest = text[end:]
        return text[:end]


@attrs.frozen
class WholeCall:
    name: str
    arguments: str
    """JSON text."""


@attrs.frozen
class _Member:
    value: Any
    text: str


def read_whole_call(text: str, functions: Collection[str]) -> WholeCall | None:
    """The call that this object is, with its keys in any order; None if it is none.

    Arguments may be missing, or be JSON in a string.
    """
    try:
        members = _members(text)
    except (ValueError, IndexError, RecursionError):
        return None
    name = members["name"].value if "name" in members else None
    if not isinstance(name, str) or name not in functions:
        return None
    given = next((members[key] for key in _ARGUMENTS_KEYS if key in members), _Member(None, "null"))
    arguments = _arguments_text(given)
    return None if arguments is None else WholeCall(name, arguments)


def _arguments_text(given: _Member) -> str | None:
    match given.value:
        case None:
            return "{}"
        case dict():
            return given.text
        case str(text) if _is_object(text):
            return text
    return None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _members(text: str) -> dict[str, _Member]:
    """Of an object. Raises ValueError, IndexError, RecursionError: it is not JSON, or nested too deeply."""
    json.loads(text)
    decode = json.JSONDecoder().raw_decode
    members: dict[str, _Member] = {}
    position = _skip(text, "{", 0)
    while text[position] == '"':
        key, position = decode(text, position)
        start = _skip(text, ":", position)
        value, end = decode(text, start)
        members[key] = _Member(value, text[start:end])
        position = _skip(text, ",", end)
    return members


def _skip(text: str, character: str, position: int) -> int:
    """Past white space, this character if it is there, and white space."""
    for expected in (character, ""):
        while text[position].isspace():
            position += 1
        position += bool(expected) and text[position] == expected
    return position
