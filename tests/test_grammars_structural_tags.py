"""Free text with parts of a fixed form."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_grammars import accepts, allowed_tokens, compiled, tokenizer
from trioserve.errors import InvalidRequestError

INTEGER = {"type": "integer"}
WORD = {
    "type": "object",
    "properties": {"w": {"enum": ["a", "b"]}},
    "required": ["w"],
    "additionalProperties": False,
}

OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=one>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=two>", "schema": WORD, "end": "</f>"},
        {"begin": "[[", "schema": INTEGER, "end": "]]"},
    ],
    "triggers": ["<f=", "[["],
}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_content(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


TAGS = [tag("<f=one>", json_content(INTEGER), "</f>"), tag("<f=two>", json_content(WORD), "</f>")]


@pytest.mark.parametrize(
    "structural_tag", [OLDER, form("triggered_tags", triggers=["<f="], tags=TAGS)], ids=["older", "newer"]
)
def test_text_is_free_outside_of_tags_only(structural_tag: dict[str, Any]) -> None:
    grammar = compiled(structural_tag=structural_tag)
    for text in (
        "",
        "plain\ntext",
        "a < b",
        'x <f=one>12</f> y <f=two>{"w": "a"}</f>',
        "<f=one>1</f><f=one>2</f>",
    ):
        assert accepts(grammar.new_matcher(), text), text
    for text in ("<f=", "<f=three>", "<f=one>x", "x <f=one>1", "<f=one>1</f> <f=two>1", "<f=two>{}</f>"):
        assert not accepts(grammar.new_matcher(), text), text


def test_several_triggers() -> None:
    grammar = compiled(structural_tag=OLDER)
    assert accepts(grammar.new_matcher(), "[[5]] and <f=one>6</f> [ [")
    assert not accepts(grammar.new_matcher(), "[[x]]")


@pytest.mark.parametrize(
    ("structural_tag", "good", "bad"),
    [
        (form("const_string", value='a/b"c'), ['a/b"c'], ["a", ""]),
        (form("json_schema", json_schema=INTEGER), ["12"], ["x", ""]),
        (form("regex", pattern="[a/]{2}\\/"), ["aa/", "a//"], ["aaa"]),
        (form("any_text"), ["", "anything"], []),
        (
            form("or", elements=[{"type": "const_string", "value": "x"}, json_content(INTEGER)]),
            ["x", "5"],
            ["x5"],
        ),
        (
            form("sequence", elements=[{"type": "const_string", "value": "n="}, json_content(INTEGER)]),
            ["n=5"],
            ["n=", "5"],
        ),
        (
            form("tag", begin="<t>", content={"type": "any_text"}, end="</t>"),
            ["<t>a<b</t>"],
            ["<t>", "<t></t>x"],
        ),
        (
            form("triggered_tags", triggers=["<f="], tags=TAGS, at_least_one=True),
            ["a <f=one>1</f> b"],
            ["", "text"],
        ),
        (
            form("triggered_tags", triggers=["<f="], tags=TAGS, stop_after_first=True),
            ["text", "a <f=one>1</f>"],
            ["<f=one>1</f> b"],
        ),
        (
            form("tags_with_separator", tags=TAGS, separator=";"),
            ["", "<f=one>1</f>", "<f=one>1</f>;<f=one>2</f>"],
            ["x", "<f=one>1</f><f=one>2</f>", ";"],
        ),
        (
            form("tags_with_separator", tags=TAGS, separator=";", at_least_one=True, stop_after_first=True),
            ["<f=one>1</f>"],
            ["", "<f=one>1</f>;<f=one>2</f>"],
        ),
    ],
)
def test_formats(structural_tag: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = compiled(structural_tag=structural_tag)
    for text in good:
        assert accepts(grammar.new_matcher(), text), text
    for text in bad:
        assert not accepts(grammar.new_matcher(), text), text


def test_marks_may_be_special_tokens() -> None:
    start, end = (
        tokenizer().tokenize_str(f"<|im_{name}|>", parse_special=True)[0] for name in ("start", "end")
    )
    structural_tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<|im_start|>call ", "schema": INTEGER, "end": "<repo_name>"}],
        "triggers": ["<|im_start|>"],
    }
    matcher = compiled(structural_tag=structural_tag).new_matcher()
    matcher.advance(tokenizer().tokenize_str("some text"))
    assert start in allowed_tokens(matcher)
    matcher.advance([start, *tokenizer().tokenize_str("call 5")])
    allowed = allowed_tokens(matcher)
    assert tokenizer().tokenize_str("<repo_name>")[0] in allowed
    assert end not in allowed


def test_the_style_of_json_holds_within_tags() -> None:
    grammar = compiled(structural_tag=OLDER, disable_any_whitespace=True)
    assert accepts(grammar.new_matcher(), '<f=two>{"w":"a"}</f>')
    assert not accepts(grammar.new_matcher(), '<f=two>{"w": "a"}</f>')


@pytest.mark.parametrize(
    ("structural_tag", "reason"),
    [
        ("[1]", "an object with"),
        ("{", "not JSON"),
        ({"type": "other"}, "an object with"),
        ({"type": "structural_tag"}, "structures must be"),
        ({**OLDER, "triggers": []}, "triggers must be"),
        ({**OLDER, "triggers": ["<f="]}, "no trigger starts the tag '\\[\\['"),
        ({**OLDER, "triggers": ["<f=", "[[", "zz"]}, "no tag begins with the trigger 'zz'"),
        (form("qwen_xml_parameter", json_schema={}), "got 'qwen_xml_parameter'"),
        (form("json_schema", json_schema=5), "a JSON schema is an object"),
        (form("json_schema", json_schema={"not": {}}), "Unimplemented"),
        (form("tag", begin=1, content={"type": "any_text"}, end=""), "begin must be a string"),
        (form("sequence", elements=[{"type": "any_text"}, {"type": "any_text"}]), "last element"),
    ],
)
def test_what_cannot_be_expressed(structural_tag: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        compiled(structural_tag=structural_tag)


def test_endless_nesting() -> None:
    nested: dict[str, Any] = {"type": "any_text"}
    for _ in range(40):
        nested = {"type": "sequence", "elements": [nested]}
    with pytest.raises(InvalidRequestError, match="nested"):
        compiled(structural_tag={"type": "structural_tag", "format": nested})
