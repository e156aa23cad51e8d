"""For the tests of parsers: functions to call, and what parts say when they are joined."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from trioserve.parsers.answer_form import AnswerForm, ReasoningForm
from trioserve.parsers.call_formats import CALL_FORMATS
from trioserve.parsers.parts import CallPart, ReasoningPart
from trioserve.reasoning import find_reasoning_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.parsers.answer_parser import AnswerParser
    from trioserve.parsers.parts import Part

STRING = {"type": "string"}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": STRING, "days": {"type": "integer"}}},
    "search": {"type": "object", "properties": {"query": STRING, "limit": {"type": ["integer", "null"]}}},
    "run_python": {"type": "object", "properties": {"code": STRING}},
    "list_files": {"type": "object", "properties": {}},
}


def parser_of(calls: str | None, reasoning: str | None = None, *, is_open: bool = False) -> AnswerParser:
    """By the names of its formats."""
    marks = None if reasoning is None else find_reasoning_format(reasoning, None, None)
    return AnswerForm(
        calls=None if calls is None else CALL_FORMATS[calls],
        functions=FUNCTIONS,
        reasoning=None if marks is None else ReasoningForm(marks=marks, is_open=is_open, is_closed=False),
    ).new_parser()


def read(parser: AnswerParser, pieces: Iterable[str]) -> list[Part]:
    return [*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.finish()]


def joined(parts: Iterable[Part]) -> list[dict[str, str]]:
    """What a client makes of them, by the rules of `CallPart`."""
    found: list[dict[str, str]] = []
    num_calls = 0
    for part in parts:
        if isinstance(part, CallPart):
            if part.name is not None:
                assert (part.index, part.arguments) == (num_calls, "")
                num_calls += 1
                found.append({"call": part.name, "arguments": ""})
            else:
                assert part.arguments
                assert part.index == num_calls - 1
                assert "call" in found[-1], "nothing comes in the middle of a call"
                found[-1]["arguments"] += part.arguments
            continue
        assert part.text
        kind = "reasoning" if isinstance(part, ReasoningPart) else "text"
        if found and kind in found[-1]:
            found[-1][kind] += part.text
        else:
            found.append({kind: part.text})
    return found


def split(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]
