"""Answers that nobody would write who means well: they are read once, and what they are made of is text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from trioserve.parsers.call_formats import CALL_FORMATS
from trioserve.parsers.call_parser import CallParser
from trioserve.parsers.json_arguments import ObjectScanner
from trioserve.parsers.parts import CallPart, TextPart
from trioserve.parsers.special_tokens import SpecialTokens, WithoutSpecialTokens

if TYPE_CHECKING:
    from trioserve.parsers.answer_parser import AnswerParser
    from trioserve.parsers.parts import Part

FUNCTIONS: dict[str, dict[str, Any]] = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
OTHER_ORDER = '<tool_call>{"arguments": {"a": "x"}, "name": "f"}</tool_call>'
NO_CALL = '<tool_call>{"type": '


def read(text: str, size: int, name: str = "hermes") -> list[Part]:
    return read_with(CallParser(CALL_FORMATS[name], FUNCTIONS), text, size)


def read_with(parser: AnswerParser, text: str, size: int) -> list[Part]:
    """In pieces of this many characters."""
    parts: list[Part] = []
    for start in range(0, len(text), size):
        parts += parser.feed(text[start : start + size])
    return [*parts, *parser.finish()]


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def calls_of(parts: list[Part]) -> list[str]:
    """The arguments of each."""
    calls: dict[int, str] = {}
    for part in parts:
        if isinstance(part, CallPart):
            calls[part.index] = calls.get(part.index, "") + part.arguments
    return list(calls.values())


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters of objects were looked at, by piece."""
    lengths: list[int] = []
    scan = ObjectScanner.feed

    def feed(self: ObjectScanner, text: str) -> int | None:
        lengths.append(len(text))
        return scan(self, text)

    monkeypatch.setattr(ObjectScanner, "feed", feed)
    return lengths


@pytest.mark.parametrize("size", [7, 10**9])
@pytest.mark.parametrize("closing", ["", "}"])
def test_objects_within_objects_that_are_no_calls_are_not_read_again_and_again(
    closing: str, size: int, scanned: list[int]
) -> None:
    text = NO_CALL * 4000 + closing * 4000
    assert text_of(read(text, size)) == text
    assert sum(scanned) < 10 * len(text)


def test_a_call_behind_a_few_that_are_none_is_found() -> None:
    """Also if the first of them never ends."""
    for size in (1, 10**9):
        parts = read(f"{NO_CALL * 3} {OTHER_ORDER} and {CALL}", size)
        assert calls_of(parts) == ['{"a": "x"}'] * 2
        assert text_of(parts) == (NO_CALL * 3).rstrip() + "and"


@pytest.mark.parametrize("size", [1, 1000, 10**9])
def test_a_call_after_very_many_that_are_none_is_found_if_its_name_comes_first(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.parsers.call_parser._MAX_PASSED_OVER", 2**12)
    many = '<tool_call>{"type": "no call at all"}</tool_call>' * 200
    parts = read(many + OTHER_ORDER + CALL, size)
    assert calls_of(parts) == ['{"a": "x"}']
    assert text_of(parts) == many + OTHER_ORDER


@pytest.mark.parametrize("size", [3, 10**9])
def test_a_thousand_calls(size: int) -> None:
    assert calls_of(read(CALL * 1000, size)) == ['{"a": "x"}'] * 1000


@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_xml"])
@pytest.mark.parametrize("size", [1, 10**9])
def test_an_argument_of_a_hundred_thousand_characters(name: str, size: int) -> None:
    value = "<[{ 'x' >" * 11_000
    text = {
        "hermes": f'<tool_call>{{"arguments": {{"a": "{value}"}}, "name": "f"}}</tool_call>',
        "pythonic": f'[f(a="{value}")]',
        "qwen3_xml": f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>",
    }[name]
    (arguments,) = calls_of(parts := read(text, size, name))
    assert json.loads(arguments) == {"a": value}
    assert not text_of(parts)


@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "mistral", "pythonic", "qwen3_xml", "deepseek_v31"]
)
@pytest.mark.parametrize(
    "unit", [" ", " \n<", "{", "[", '"', "\\", "```json {", "[f(a=", "<function=f>", "not "]
)
def test_one_thing_again_and_again(name: str, unit: str) -> None:
    """Whatever that is, it is the same in one piece and in small ones."""
    text = unit * 2500
    whole, split = read(text, 10**9, name), read(text, 5, name)
    assert (text_of(whole), calls_of(whole)) == (text_of(split), calls_of(split))


@pytest.mark.parametrize("opened", ["(" * 150, "[" * 150, "{" * 150, "-" * 3000, "not " * 3000, "(" * 50_000])
def test_python_that_is_nested_too_deep_is_a_string(opened: str) -> None:
    closed = opened.translate(str.maketrans("([{", ")]}", "-not "))
    (arguments,) = calls_of(read(f"[f(a={opened}1 1{closed})]", 10**9, "pythonic"))
    assert json.loads(arguments) == {"a": f"{opened}1 1{closed}"}


@pytest.mark.parametrize("size", [1, 10**9])
def test_special_tokens_between_the_letters_of_a_mark(size: int) -> None:
    """They are not shown, so what is left is the mark."""
    tokens = SpecialTokens(["<|pad|>", "<|end|>"])
    text = "<|pad|>".join(CALL) + "<|end|>" * 3000
    parser = WithoutSpecialTokens(tokens, CallParser(CALL_FORMATS["hermes"], FUNCTIONS))
    assert calls_of(read_with(parser, text, size)) == ['{"a": "x"}']


def test_a_call_within_an_object_that_never_ends_wherever_it_is() -> None:
    for length in range(4000, 4100, 3):
        parts = read(NO_CALL + "x" * length + CALL, 10**9)
        assert calls_of(parts) == ['{"a": "x"}'], length
