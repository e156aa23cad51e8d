"""JSON objects in text that comes in pieces: where they end, and which of them are calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import regex

from trioserve.json_values import MAX_DEPTH

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
                    return mark.end()
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


def read_whole_call(text: str, functions: Collection[str]) -> WholeCall | None:
    """The call that this object is, with its keys in any order; None if it is none.

    Arguments may be missing, or be JSON in a string.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in functions:
        return None
    given = next((value[key] for key in _ARGUMENTS_KEYS if key in value), None)
    arguments = _arguments_text(given, text)
    return None if arguments is None else WholeCall(name, arguments)


def _arguments_text(given: Any, text: str) -> str | None:
    if given is None:
        return "{}"
    if isinstance(given, str):
        return given if _is_object(given) else None
    return _span_of(text) if isinstance(given, dict) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


_MEMBER = regex.compile(
    r"""
    (?(DEFINE)
        (?P<string>"(?:[^"\\]|\\.)*+")
    )
    \s*+(?P<key>(?&string))\s*+:\s*+
    """,
    regex.VERBOSE | regex.DOTALL,
)


def _span_of(text: str) -> str | None:
    """The text of the arguments, in an object that is known to be JSON and to have them."""
    position = text.index("{") + 1
    while (member := _MEMBER.match(text, position)) is not None:
        end = _value_end(text, member.end())
        if json.loads(member["key"]) in _ARGUMENTS_KEYS:
            return text[member.end() : end].rstrip()
        position = end + 1
    return None


def _value_end(text: str, start: int) -> int:
    """Where the value ends that begins here: at the comma or bracket behind it."""
    depth, is_in_string = 0, False
    for mark in regex.finditer(r'["{}\[\],]|\\.', text, regex.DOTALL, pos=start):
        if mark[0] == '"':
            is_in_string = not is_in_string
        elif is_in_string or mark[0][0] == "\\":
            continue
        elif mark[0] in "{[":
            depth += 1
        elif depth == 0:
            return mark.start()
        elif mark[0] in "}]":
            depth -= 1
    return len(text)
