"""Finds tool calls in an answer, while it comes.

The answer is of a form that `protocol.tool_schemas` makes, or the beginning of one: a token limit or a stop
string may end it anywhere. So a bracket's depth says what it is, and of a call object's strings the first is the
key "name" and the second the name.
"""

from __future__ import annotations

import attrs

__all__ = ["CallPart", "CallScanner"]

_CALL_DEPTH = 2
"""In a call object: within the array and the object."""

_NAME_POSITION = 2
"""Of a call object's strings."""


@attrs.frozen
class CallPart:
    """What is new of one call."""

    index: int
    """Of the call in the answer."""
    name: str | None
    """Of the call that begins here; None: it has begun before."""
    arguments: str
    """JSON text as it was generated: empty where a call begins, and else not. A call's parts joined are its
    arguments, of which the end may be missing."""


class CallScanner:
    """Takes the text of one answer in pieces, split anywhere. Never waits, never raises."""

    def __init__(self, function: str | None = None) -> None:
        """`function`: the answer is the arguments of this one alone."""
        self._unannounced = function
        self._outer_depth = _CALL_DEPTH if function is None else 0
        """Around the arguments."""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        """The next character of the string belongs to a backslash."""
        self._strings: list[str] = []
        """Of the call object so far, without those of its arguments; the last one may not have ended."""
        self._index = -1
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        """The answer has come to its end, and so have all its calls."""
        return self._has_ended

    def feed(self, text: str) -> list[CallPart]:
        """What the next piece of the answer says, in its order."""
        parts = []
        if self._unannounced is not None:
            parts.append(self._start_call(self._unannounced))
            self._unannounced = None
        begin = 0  # of what this piece has of arguments
        for position, character in enumerate(text):
            was_inside = self._is_inside
            name = self._advance(character)
            if name is not None:
                parts.append(self._start_call(name))
            if self._is_inside and not was_inside:
                begin = position
            elif was_inside and not self._is_inside:
                parts.append(CallPart(self._index, None, text[begin : position + 1]))
        if self._is_inside and text:
            parts.append(CallPart(self._index, None, text[begin:]))
        return parts

    @property
    def _is_inside(self) -> bool:
        """Of arguments."""
        return self._depth > self._outer_depth

    def _start_call(self, name: str) -> CallPart:
        self._index += 1
        return CallPart(self._index, name, "")

    def _advance(self, character: str) -> str | None:
        """Returns the name that ends here, if one does."""
        if self._has_ended:
            return None
        if self._is_in_string:
            return self._advance_in_string(character)
        if character == '"':
            self._is_in_string = True
            if not self._is_inside:
                self._strings.append("")
        elif character in "{[":
            self._depth += 1
            if self._depth == self._outer_depth:
                self._strings = []
        elif character in "}]":
            self._depth -= 1
            self._has_ended = self._depth == 0
        return None

    def _advance_in_string(self, character: str) -> str | None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            is_name = not self._is_inside and len(self._strings) == _NAME_POSITION
            return self._strings[-1] if is_name else None
        if not self._is_inside:
            self._strings[-1] += character
        return None
