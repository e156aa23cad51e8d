"""Finds tool calls in an answer, while it comes.

The answer is of a form that `protocol.tool_schemas` makes, or the beginning of one: a token limit or a stop
string may end it anywhere. So a bracket's depth says what it is, and of a call object's strings the first is
the key "name" and the second the name.
"""

from __future__ import annotations

import re

from trioserve.parsers.parts import CallPart

__all__ = ["CallScanner"]

_MARKS = re.compile(r'["{}\[\]]|\\.?')
"""All that matters of JSON here. A backslash and what belongs to it are one mark, unless a piece ends between
them."""

_CALL_DEPTH = 2
"""In a call object: within the array and the object."""

_NAME_POSITION = 2
"""Of a call object's strings."""


class CallScanner:
    """Takes the text of one answer in pieces, split anywhere. Never waits, never raises."""

    def __init__(self, function: str | None = None) -> None:
        """`function`: the answer is the arguments of this one alone."""
        self._unannounced = function
        self._outer_depth = _CALL_DEPTH if function is None else 0
        """Around the arguments."""
        self._depth = 0
        self._index = -1
        self._is_in_string = False
        self._is_escaped = False
        """The first character of the next piece belongs to a backslash."""
        self._num_strings = 0
        """Of the call object so far, without those of its arguments."""
        self._string = ""
        """The last one of them, as far as it has come."""
        self._begin = 0
        """In the piece at hand: of what it has of arguments, or of that string."""
        self._has_ended = False

    is_reasoning = False

    @property
    def has_called(self) -> bool:
        """The answer has come to its end, and so have all its calls."""
        return self._has_ended

    def feed(self, text: str) -> list[CallPart]:
        """What the next piece of the answer says, in its order."""
        parts: list[CallPart | None] = []
        if self._unannounced is not None:
            parts.append(self._start_call(self._unannounced))
            self._unannounced = None
        if not text:
            return list(filter(None, parts))
        self._begin = 0
        start, self._is_escaped = int(self._is_escaped), False
        for mark in _MARKS.finditer(text, start):
            if self._has_ended:
                break
            parts.append(self._pass(mark, text))
        parts.append(self._take_rest(text))
        return list(filter(None, parts))

    def finish(self) -> list[CallPart]:
        return []

    @property
    def _is_inside(self) -> bool:
        """Of arguments."""
        return self._depth > self._outer_depth

    def _start_call(self, name: str) -> CallPart:
        self._index += 1
        return CallPart(self._index, name, "")

    def _pass(self, mark: re.Match[str], text: str) -> CallPart | None:
        """Returns the part that ends with this mark, if one does."""
        match mark[0]:
            case '"':
                return self._pass_quote(mark.start(), text)
            case "{" | "[" | "}" | "]" if not self._is_in_string:
                return self._pass_bracket(mark.start(), text)
            case "\\":
                self._is_escaped = True
        return None

    def _pass_quote(self, position: int, text: str) -> CallPart | None:
        self._is_in_string = not self._is_in_string
        if self._is_inside:
            return None
        if self._is_in_string:
            self._num_strings += 1
            self._string = ""
            self._begin = position + 1
            return None
        self._string += text[self._begin : position]
        return self._start_call(self._string) if self._num_strings == _NAME_POSITION else None

    def _pass_bracket(self, position: int, text: str) -> CallPart | None:
        if text[position] in "{[":
            if self._depth == self._outer_depth:
                self._begin = position
            self._depth += 1
            if self._depth == self._outer_depth:
                self._num_strings = 0
            return None
        self._depth -= 1
        self._has_ended = self._depth == 0
        if self._depth != self._outer_depth:
            return None
        return CallPart(self._index, None, text[self._begin : position + 1])

    def _take_rest(self, text: str) -> CallPart | None:
        """What follows the last mark of a piece."""
        if self._is_inside:
            return CallPart(self._index, None, text[self._begin :])
        if self._is_in_string:
            self._string += text[self._begin :]
        return None
