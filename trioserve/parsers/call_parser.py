"""Finds calls of tools in an answer, while it comes: one machine for all formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.parsers.held_back import in_pieces
from trioserve.parsers.json_arguments import ObjectScanner, read_whole_call
from trioserve.parsers.parts import CallPart, TextPart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regex import Match, Pattern

    from trioserve.parsers.call_format import ArgumentsReader, CallFormat, Spelling
    from trioserve.parsers.parts import Part

__all__ = ["CallParser"]

_MAX_PASSED_OVER = 2**18
"""Characters of objects that were read whole and are no calls. Their text is read once more, and may have the
beginning of another one in it: without a limit an answer could be read as often as it has such beginnings."""


class CallParser:
    """Goes through an answer as

        text -> opening -> head -> arguments -> tail -> separator and head of the next call, or text

    An opening that is not followed by the head of a call that the request knows becomes text, whole: nothing
    is told of a call before its name is known. From then on it is a call, whatever its arguments are. White
    space around calls belongs to neither.
    """

    is_reasoning = False

    def __init__(self, form: CallFormat, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: the schema of the arguments by name."""
        self._form = form
        self._functions = functions
        self._parts: list[Part] = []
        self._num_calls = 0
        self._is_open = False
        """A call has begun, and its arguments have not ended."""
        self._coming: list[str] = []
        """Pieces that are to be read after what is held, the last one first."""
        # Invariant: what is held has neither been told nor been dropped. Of it, the characters before
        # _position are an opening or a separator, which becomes text if no call follows.
        self._held = ""
        self._position = 0
        self._step: Callable[[], bool] = self._find_start if form.start is not None else self._find_opening
        """Does what can be done now. False: more of the answer has to come first."""
        self._has_ended = False
        self._drops_space = False
        """At the beginning of the text to come: it follows a call."""
        self._spelling: Spelling
        """Of the call at hand, as is the next."""
        self._reader: ArgumentsReader
        # Of an object that may be a call: where it begins, and how much was looked at.
        self._scanner: ObjectScanner
        self._object_start = 0
        self._num_scanned = 0
        self._num_passed_over = 0

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0 and not self._is_open

    def feed(self, text: str) -> list[Part]:
        self._coming = in_pieces(text)[::-1]
        while self._coming:
            self._hold(self._coming.pop())
            while self._held and self._step():
                pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        self._has_ended = True
        return self.feed("")

    # Each of these is a state

    def _find_start(self) -> bool:
        """At the beginning of the answer."""
        assert self._form.start is not None
        found = self._match(self._form.start)
        if found is None:
            return self._go_to(self._find_opening)
        return not found.partial and self._expect_head(found)

    def _find_opening(self) -> bool:
        found = self._form.opening.search(self._held, partial=not self._is_whole)
        if found is None:
            return self._tell(len(self._held))
        self._tell(found.start())
        if found.partial:
            return False
        if found["dropped"]:
            return self._drop(found.end() - found.start())
        self._position = found.end() - found.start()
        return self._go_to(self._find_head)

    def _find_head(self) -> bool:
        reads_whole = self._num_passed_over < _MAX_PASSED_OVER
        for spelling in self._form.spellings:
            for pattern in filter(None, (spelling.head, spelling.loose_head if reads_whole else None)):
                found = self._match(pattern)
                if found is not None:
                    self._spelling = spelling
                    return not found.partial and self._take_head(found)
        return self._reject()

    def _read_arguments(self) -> bool:
        self._tell_arguments(self._reader.feed(self._held))
        self._held = self._reader.rest or ""
        return self._reader.rest is not None and self._end_call(self._skip_tail)

    def _read_whole_call(self) -> bool:
        length = self._scanner.feed(self._held[self._num_scanned :])
        if length is None:
            self._num_scanned = len(self._held)
            return self._is_whole and self._pass_over(self._num_scanned)
        end = self._num_scanned + length
        call = read_whole_call(self._held[self._object_start : end], self._functions)
        if call is None:
            return self._pass_over(end)
        self._drop(end)
        self._begin_call(call.name)
        self._tell_arguments(call.arguments)
        return self._end_call(self._after_call)

    def _skip_tail(self) -> bool:
        found = None if self._spelling.tail is None else self._match(self._spelling.tail)
        if found is not None and found.partial:
            return False
        self._drop(0 if found is None else found.end())
        return self._go_to(self._after_call)

    def _after_call(self) -> bool:
        for pattern in filter(None, (self._spelling.next, self._spelling.closing)):
            found = self._match(pattern)
            if found is None:
                continue
            if not found.partial and pattern is self._spelling.next:
                return self._expect_head(found)
            if not found.partial:
                self._drop(found.end())
                return self._go_to(self._find_opening)
            return False
        return self._go_to(self._find_opening)

    # From one to another

    def _match(self, pattern: Pattern[str]) -> Match[str] | None:
        return pattern.match(self._held, self._position, partial=not self._is_whole)

    @property
    def _is_whole(self) -> bool:
        """Nothing will come after what is held."""
        return self._has_ended and not self._coming

    def _hold(self, text: str) -> None:
        held, self._held = self._held, ""
        held += text  # in place, as nobody else has it: what is held may be long
        self._held = held

    def _go_to(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _expect_head(self, opening: Match[str]) -> bool:
        self._position = opening.end()
        return self._go_to(self._find_head)

    def _take_head(self, head: Match[str]) -> bool:
        name, groups = head["name"], head.groupdict()
        if name is not None and name not in self._functions:
            return self._reject()
        if "object" in groups:
            self._scanner = ObjectScanner()
            self._object_start = self._num_scanned = head.start("object")
            return self._go_to(self._read_whole_call)
        self._drop(head.end())
        self._begin_call(name)
        self._reader = self._spelling.new_reader(self._functions[name])
        return self._go_to(self._read_arguments)

    def _reject(self) -> bool:
        """What looked like a call is text, and may have a call in it."""
        self._tell(max(self._position, 1))
        return self._go_to(self._find_opening)

    def _pass_over(self, end: int) -> bool:
        """The object that was read up to here is no call."""
        self._num_passed_over += end - self._object_start
        self._reject()
        self._coming += in_pieces(self._held)[::-1]
        self._held = ""
        return True

    def _begin_call(self, name: str) -> None:
        self._parts.append(CallPart(self._num_calls, name, ""))
        self._num_calls += 1
        self._is_open = True

    def _end_call(self, step: Callable[[], bool]) -> bool:
        self._is_open, self._drops_space = False, True
        return self._go_to(step)

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._parts.append(CallPart(self._num_calls - 1, None, text))

    def _tell(self, length: int) -> bool:
        text = self._held[:length]
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        if text:
            self._parts.append(TextPart(text))
        return self._drop(length)

    def _drop(self, length: int) -> bool:
        self._held = self._held[length:]
        self._position = 0
        return True
