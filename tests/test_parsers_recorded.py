"""Recorded answers in every format: what they say, wherever they are split."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_parsers import FUNCTIONS, joined, parser_of, read, split
from trioserve.parsers.call_formats import CALL_FORMATS
from trioserve.server_args import TOOL_CALL_PARSERS

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "recorded_answers.json").read_text()
)
EACH = pytest.mark.parametrize("answer", RECORDED, ids=range(len(RECORDED)))


def outcome(answer: dict[str, Any], pieces: Any) -> tuple[list[dict[str, str]], bool]:
    parser = parser_of(answer["format"], answer["reasoning"], is_open=answer["is_open"])
    parts = read(parser, pieces)
    return joined(parts), parser.has_called


def expected(answer: dict[str, Any]) -> tuple[list[dict[str, str]], bool]:
    return answer["parts"], answer["is_whole_call"]


def test_there_are_answers_of_every_format() -> None:
    assert len(RECORDED) >= 30
    assert {CALL_FORMATS[answer["format"]] for answer in RECORDED} == set(CALL_FORMATS.values())
    assert {"auto", "none", *CALL_FORMATS} == set(TOOL_CALL_PARSERS)


@EACH
def test_a_whole_answer(answer: dict[str, Any]) -> None:
    assert outcome(answer, [answer["text"]]) == expected(answer)


@EACH
def test_whole_calls_have_json_objects(answer: dict[str, Any]) -> None:
    calls = [part["arguments"] for part in answer["parts"] if "call" in part]
    if answer["is_whole_call"]:
        assert calls
        assert all(isinstance(json.loads(arguments), dict) for arguments in calls)


@EACH
def test_every_split_in_two(answer: dict[str, Any]) -> None:
    for place in range(len(answer["text"]) + 1):
        assert outcome(answer, split(answer["text"], [place])) == expected(answer), place


@EACH
def test_splits_in_many(answer: dict[str, Any]) -> None:
    draw = random.Random(1)
    text = answer["text"]
    assert outcome(answer, text) == expected(answer), "every character by itself"
    for _ in range(30):
        places = draw.choices(range(len(text) + 1), k=draw.randrange(2, 20))
        assert outcome(answer, split(text, places)) == expected(answer), places


@EACH
def test_nothing_that_was_told_is_taken_back(answer: dict[str, Any]) -> None:
    """A stream is a beginning of what it becomes: as text, whatever part it is of."""
    whole = [list(part.values()) for part in answer["parts"]]
    parser = parser_of(answer["format"], answer["reasoning"], is_open=answer["is_open"])
    parts: list[Any] = []
    for character in answer["text"]:
        parts += parser.feed(character)
        told = [list(part.values()) for part in joined(parts)]
        assert len(told) <= len(whole)
        for position, (some, full) in enumerate(zip(told, whole, strict=False)):
            assert some[:-1] == full[:-1]
            assert full[-1].startswith(some[-1])
            assert position == len(told) - 1 or some == full


PIECES = sorted(
    {mark for form in CALL_FORMATS.values() for mark in form.marks}
    | {"<think>", "</think>", "<function=", "search", ">", "<parameter=query>", "</parameter>", "</function>"}
    | {'{"name": "search", "arguments": ', '{"name": "search", "parameters": ', '"', "\\", "{", "}", "[", "]"}
    | {"(", ")", "query=", "query='", "'", ",", ";", ":", "```json", "```", "\n", " ", "\u00e9", "a", "-1"}
    | {'{"arguments": {}, "name": "search"}', '"""'}
)
FORMATS = sorted({form.name for form in CALL_FORMATS.values()})


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(FORMATS), st.sampled_from([None, "qwen3", "deepseek_r1"]), st.booleans(),
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25), st.data(),
)  # fmt: skip
def test_whatever_the_text_is(
    name: str, thinks: str | None, is_open: bool, pieces: list[str], data: Any
) -> None:
    """Nothing raises, splits do not matter, and what is no call and no mark is told."""
    text = "".join(pieces)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    answer = {"format": name, "reasoning": thinks, "is_open": is_open}
    found, has_called = outcome(answer, [text])
    assert outcome(answer, split(text, places)) == (found, has_called)
    for part in found:
        assert "call" not in part or part["call"] in FUNCTIONS
    if not any("call" in part for part in found) and thinks is None:
        told = "".join(part["text"] for part in found)
        assert told.replace("<|python_end|>", "") == text.replace("<|python_end|>", "") or name in {
            "pythonic", "deepseek_v3", "deepseek_v31",
        }  # fmt: skip
