"""Arguments as Python writes them: `city="Paris", days=3)`."""

from __future__ import annotations

import ast
import warnings
from typing import TYPE_CHECKING, Any

import regex

from trioserve.parsers.to_json import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PythonArguments"]

_MARKS = regex.compile(r"\\.|[\"'(){}\[\],]", regex.DOTALL)

_KEYWORD = regex.compile(r"\s*([^\W\d]\w*)\s*=")

_NAMES = {"true": True, "false": False, "null": None}
"""What models write who think of JSON."""


class PythonArguments:
    """Keyword arguments up to the bracket that closes the call.

    An argument is passed on once it is whole. What is no literal is passed on as a string of its source.
    """

    def __init__(self, _schema: Mapping[str, Any]) -> None:
        self.rest: str | None = None
        # Of the argument at hand: its text, and what of it has been looked at.
        self._text = ""
        self._position = 0
        self._depth = 0
        self._quote = ""
        """Of the string that is open: one or three quotation marks."""
        self._written = 0

    def feed(self, text: str) -> str:
        held, self._text = self._text, ""
        held += text  # in place, as nobody else has it: an argument may be long
        self._text = held
        fragments = []
        while (end := self._find_end()) is not None:
            fragments.append(self._write(self._text[:end]))
            closes, self._text, self._position = self._text[end] == ")", self._text[end + 1 :], 0
            if closes:
                self.rest = self._text
                fragments.append("}" if self._written else "{}")
                break
        return "".join(fragments)

    def _find_end(self) -> int | None:
        """Where the comma or the bracket is that ends the argument at hand."""
        while (mark := _MARKS.search(self._text, self._position)) is not None:
            quotes = self._quotes(mark.start()) if mark[0] in {'"', "'"} else mark[0]
            if quotes is None:
                return None
            self._position = mark.start()
            if self._depth == 0 and not self._quote and quotes in {",", ")"}:
                return self._position
            self._position += len(quotes)
            self._pass(quotes)
        self._position = max(self._position, len(self._text) - self._text.endswith("\\"))
        return None

    def _quotes(self, position: int) -> str | None:
        """One quotation mark or three; None where that is not known yet."""
        triple = self._text[position] * 3
        found = self._text[position : position + 3]
        if found == triple and self._quote != triple[0]:
            return triple
        if len(found) < 3 and triple.startswith(found) and self._quote != triple[0]:
            return None
        return triple[0]

    def _pass(self, mark: str) -> None:
        if self._quote:
            self._quote = "" if mark == self._quote else self._quote
        elif mark[0] in "\"'":
            self._quote = mark
        elif mark in "([{":
            self._depth += 1
        elif mark in ")]}":
            self._depth = max(0, self._depth - 1)

    def _write(self, source: str) -> str:
        if not source.strip():
            return ""  # after a last comma
        keyword = _KEYWORD.match(source)
        name, start = (keyword[1], keyword.end()) if keyword else (str(self._written), 0)
        self._written += 1
        return f"{'{' if self._written == 1 else ', '}{to_json(name)}: {_value_json(source[start:].strip())}"


def _value_json(source: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Python thinks of the model's escapes
            tree = ast.parse(source, mode="eval")
        return to_json(_value(tree.body))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return to_json(source)


def _value(node: ast.expr) -> Any:
    """Raises ValueError: it is no literal."""
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
    raise ValueError("no literal")


def _key(node: ast.expr) -> str:
    value = _value(node)
    return value if isinstance(value, str) else to_json(value)
