"""How models write calls of tools: what a format consists of. `call_formats` has those that are known.

All patterns are matched against text that may end anywhere, so each of them ends with what decides it: a
literal, or a look at one. Runs of white space in them are bounded, which bounds what is held back, and
possessive, as there are models that write nothing else for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
from regex import Pattern

__all__ = ["ArgumentsReader", "CallFormat", "Spelling", "StrictForm", "fill_in"]


class ArgumentsReader(Protocol):
    """Reads the arguments of one call, from their first character on, in pieces split anywhere."""

    rest: str | None
    """What follows the arguments; None until they have ended. Then `feed` is called no more."""

    def feed(self, text: str) -> str:
        """JSON text that these characters make known: joined, it is the arguments."""


@attrs.frozen(kw_only=True)
class Spelling:
    """One way of writing a call. White space between its parts means nothing."""

    head: Pattern[str]
    """All before the arguments, with the group `name`."""
    new_reader: Callable[[Mapping[str, Any]], ArgumentsReader]
    """Of arguments with this JSON schema."""
    tail: Pattern[str] | None = None
    """What belongs to the call after them; models forget it, so it may be missing."""
    next: Pattern[str] | None = None
    """Between this call and the head of another one."""
    closing: Pattern[str] | None = None
    """The end of the calls; it may be missing."""
    loose_head: Pattern[str] | None = None
    """The beginning of an object that may be a call with its keys in another order: nobody can know before it
    ends, so it is held back until then."""


@attrs.frozen(kw_only=True)
class StrictForm:
    """A call for grammars, as the model was trained to write it. `NAME` stands for the function's name."""

    trigger: str
    """After this text there must be a call. If it has a name in it, only calls of this function are held to
    a form, and else all are: then it is a beginning of `begin`."""
    begin: str
    """All before the arguments."""
    end: str
    separator: str | None = None
    """Between calls that are all there is of an answer; None: it takes more than that to write it."""


def fill_in(text: str, function: str) -> str:
    return text.replace("NAME", function)


@attrs.frozen(kw_only=True)
class CallFormat:
    name: str
    signs: tuple[tuple[str, ...], ...]
    """A chat template with all texts of one of these teaches this format."""
    opening: Pattern[str]
    """What begins calls anywhere in an answer, or else its group `dropped`: a mark that means nothing outside
    of calls, and is not shown."""
    start: Pattern[str] | None = None
    """What begins calls at the beginning of an answer only."""
    spellings: tuple[Spelling, ...]
    """The first whose head fits is taken."""
    marks: tuple[str, ...]
    """Texts of the format that are tokens of their own in some vocabularies."""
    strict: StrictForm | None = None
    """None: it has no form that a grammar could be told to begin with."""
