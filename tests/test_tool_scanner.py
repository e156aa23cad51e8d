"""Tool calls found in an answer that comes in pieces: wherever it is split, they are the same."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.parsers.forced_calls import CallScanner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Calls = list[tuple[str, str]]
"""(name, text of the arguments) of each."""

NO_ARGUMENTS: Calls = [("list_files", "{}")]
INTEGER_FIRST: Calls = [("add", '{"a": 1, "b": 22}'), ("add", '{"a":-3,"b":0}')]
OBJECTS: Calls = [("plan", '{"steps": [{"id": 1, "tags": []}, {"id": 2, "tags": ["x", "y"]}], "dry": true}')]
BRACES_IN_STRINGS: Calls = [
    ("run", '{"code": "if (a[0]) { f(\\"}]\\"); }", "{": "["}'),
    ("list_files", "{ }"),
]
ESCAPES: Calls = [
    ("write", r'{"path": "C:\\", "text": "\\\" \u00e9\ud83e\udee0 \n\/ \\\\"}'),
    ("f", r'{"\"":"\\"}'),
]
UNICODE: Calls = [("say", '{"text": "\U0001fae0\u9f9c \u00e9\u0301", "\u540d\u524d": "\u2028"}')]
DECEPTIVE: Calls = [
    ("name", '{"name": "arguments", "arguments": {"name": "x"}}'),
    ("arguments", '{"name": {}}'),
]
SPACED: Calls = [("f", '{\n   "a":\n [1,\n\t2]\n}')]
RECORDED = [
    NO_ARGUMENTS, INTEGER_FIRST, OBJECTS, BRACES_IN_STRINGS, ESCAPES, UNICODE, DECEPTIVE, SPACED,
    [*NO_ARGUMENTS, *OBJECTS, *BRACES_IN_STRINGS],
]  # fmt: skip


def compact(calls: Calls) -> str:
    return "[" + ",".join(f'{{"name":"{name}","arguments":{text}}}' for name, text in calls) + "]"


def spaced(calls: Calls) -> str:
    return (
        "[\n " + " ,\n".join(f'{{ "name" : "{n}",\n "arguments"\n:\n {text} }}' for n, text in calls) + "\n ]"
    )


ANSWERS = [(write(calls), calls) for write in (compact, spaced) for calls in RECORDED]
EACH = pytest.mark.parametrize(("answer", "calls"), ANSWERS)


def scan(pieces: Iterable[str], function: str | None = None) -> tuple[Calls, bool]:
    """The calls that the parts make, by the rules of a client; and whether they are all there is."""
    scanner = CallScanner(function)
    found: dict[int, list[str]] = {}
    for part in itertools.chain.from_iterable(map(scanner.feed, pieces)):
        if part.name is not None:
            assert part.index == len(found), "calls begin in their order, each once"
            assert not part.arguments
            found[part.index] = [part.name, ""]
        else:
            assert part.arguments, "a part says something"
            assert part.index == len(found) - 1, "a call goes on only until the next begins"
        found[part.index][1] += part.arguments
    return [(name, arguments) for name, arguments in found.values()], scanner.has_called


def split(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


@EACH
def test_the_recorded_answers_are_json(answer: str, calls: Calls) -> None:
    parsed = json.loads(answer)
    assert [(call["name"], call["arguments"]) for call in parsed] == [
        (n, json.loads(text)) for n, text in calls
    ]


@EACH
def test_a_whole_answer(answer: str, calls: Calls) -> None:
    assert scan([answer]) == (calls, True)


@EACH
def test_every_split_in_two(answer: str, calls: Calls) -> None:
    for place in range(len(answer) + 1):
        assert scan(split(answer, [place])) == (calls, True), place


@EACH
def test_splits_in_many(answer: str, calls: Calls) -> None:
    draw = random.Random(1)
    assert scan(answer) == (calls, True), "every character by itself"
    for _ in range(100):
        places = draw.choices(range(len(answer) + 1), k=draw.randrange(2, 20))  # some pieces are empty
        assert scan(split(answer, places)) == (calls, True), places


@EACH
def test_a_named_functions_answer_is_its_arguments(answer: str, calls: Calls) -> None:
    for name, text in calls:
        for place in range(len(text) + 1):
            assert scan(split(text, [place]), name) == ([(name, text)], True)
        assert scan(text, name) == ([(name, text)], True)


@EACH
def test_an_answer_that_was_cut_off(answer: str, calls: Calls) -> None:
    for length in range(len(answer)):
        found, has_called = scan([answer[:length]])
        assert (found, has_called) == scan(answer[:length])
        assert not has_called
        for position, ((name, text), (whole_name, whole_text)) in enumerate(zip(found, calls, strict=False)):
            assert name == whole_name
            assert text == whole_text if position < len(found) - 1 else whole_text.startswith(text)


@EACH
def test_arguments_come_as_soon_as_they_are_there(answer: str, calls: Calls) -> None:
    """Nothing is held back: what is known of a call after each character is all of it so far."""
    begin = 0
    for index, (name, text) in enumerate(calls):
        begin = answer.index(text, answer.index(f'"{name}"', begin) + len(name) + 2)
        for length in range(len(text) + 1):
            assert scan(answer[: begin + length])[0][index:] == [(name, text[:length])]
        begin += len(text)


def test_nothing_follows_the_end() -> None:
    assert scan([compact(OBJECTS), '<|im_end|> [{"name":"f","arguments":{}}]']) == (OBJECTS, True)
    assert scan(["{}", "{}"], "f") == ([("f", "{}")], True)


def test_a_named_function_is_called_before_its_arguments_come() -> None:
    assert scan([], "f") == ([], False)
    assert scan([""], "f") == ([("f", "")], False)


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    st.booleans(),
    st.none() | st.integers(0, 2),
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["f", "name", "get-it_2"]), ARGUMENTS), min_size=1, max_size=3),
    st.data(),
)
def test_whatever_the_arguments_are(calls: Calls, data: Any) -> None:
    answer = data.draw(st.sampled_from([compact, spaced]))(calls)
    places = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    assert scan(split(answer, places)) == (calls, True)
