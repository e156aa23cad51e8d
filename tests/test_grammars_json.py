"""JSON by schema: random texts that the grammar allows, judged by jsonschema."""

from __future__ import annotations

import json

import pytest

from helpers_grammars import accepts, compiled, smollm2, tokenizer, walk
from json_schemas import ACCEPTED, REFUSED, assert_valid
from trioserve.config import StructuredOutputsConfig
from trioserve.errors import InvalidRequestError
from trioserve.grammars.checking import Setup, check
from trioserve.structured_outputs import StructuredOutputsParams

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_a_schema_allows_is_valid(name: str) -> None:
    schema = ACCEPTED[name]
    grammar = compiled(json=schema)
    for seed in range(3):
        text = walk(grammar.new_matcher(), seed)
        assert text is not None
        assert_valid(text, schema)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(name: str) -> None:
    setup = Setup(model=smollm2(), config=StructuredOutputsConfig())
    verdict = check(setup, tokenizer(), StructuredOutputsParams(json=REFUSED[name]))
    assert verdict.grammar is None
    assert verdict.refused is not None
    assert verdict.refused.startswith("structured_outputs cannot be used: ")
    assert len(verdict.refused) < 400


def test_there_are_two_hundred_schemas_and_forty_tools() -> None:
    assert len(ACCEPTED) >= 200
    assert sum(name.startswith("tool") for name in ACCEPTED) >= 40


def test_a_refusal_says_why() -> None:
    with pytest.raises(InvalidRequestError, match=r'Unimplemented keys: \["not"\]') as caught:
        compiled(json={"not": {}})
    assert caught.value.parameter == "structured_outputs"


def test_json_object_is_any_object() -> None:
    grammar = compiled(json_object=True)
    for seed in range(5):
        text = walk(grammar.new_matcher(), seed)
        assert text is not None
        assert isinstance(json.loads(text), dict)
    assert accepts(grammar.new_matcher(), '{"a": [1, {"b": null}], "c": "é"}')
    assert not accepts(grammar.new_matcher(), "[1]")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1}', True),
        ('{ "a" : 1 }', True),
        ('{\n  "a": 1\n}', True),
        ('{\n\t"a":1}', True),
        ('{  "a":1}', False),
        ('{\n\n"a":1}', False),
    ],
)
def test_between_tokens_there_is_a_space_or_a_line_break_with_its_indentation(text: str, fits: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    assert accepts(compiled(json=schema).new_matcher(), text) == fits


@pytest.mark.parametrize("by_request", [True, False])
def test_no_whitespace(by_request: bool) -> None:
    config = StructuredOutputsConfig(disable_any_whitespace=not by_request)
    grammar = compiled(config, json=POINT, disable_any_whitespace=by_request)
    assert accepts(grammar.new_matcher(), '{"x":1}')
    assert not accepts(grammar.new_matcher(), '{"x": 1}')


def test_whitespace_pattern() -> None:
    grammar = compiled(json=POINT, whitespace_pattern=" ?")
    assert accepts(grammar.new_matcher(), '{"x": 1}')
    assert not accepts(grammar.new_matcher(), '{"x":  1}')
    assert not accepts(grammar.new_matcher(), '{"x":\n1}')


def test_a_bad_whitespace_pattern() -> None:
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        compiled(json=POINT, whitespace_pattern="(")


@pytest.mark.parametrize("by_request", [True, False])
def test_no_additional_properties(by_request: bool) -> None:
    config = StructuredOutputsConfig(disable_additional_properties=not by_request)
    schema = {
        "type": "object",
        "properties": {"p": POINT, "free": {**POINT, "additionalProperties": {"type": "integer"}}},
        "required": ["p", "free"],
    }
    open_grammar = compiled(json=schema)
    closed_grammar = compiled(config, json=schema, disable_additional_properties=by_request)
    as_named = '{"p":{"x":1},"free":{"x":1,"y":2}}'
    assert accepts(open_grammar.new_matcher(), as_named)
    assert accepts(closed_grammar.new_matcher(), as_named)
    for more in ('{"p":{"x":1,"y":2},"free":{"x":1}}', '{"p":{"x":1},"free":{"x":1},"more":0}'):
        assert accepts(open_grammar.new_matcher(), more)
        assert not accepts(closed_grammar.new_matcher(), more)


def test_closing_objects_spares_data_and_parts() -> None:
    schema = {
        "allOf": [POINT, {"type": "object", "properties": {"y": {"const": {"properties": {}}}}}],
        "properties": {"properties": {"type": "integer"}},
        "required": ["x", "y"],
    }
    grammar = compiled(json=schema, disable_additional_properties=True)
    assert accepts(grammar.new_matcher(), '{"x":1,"y":{"properties":{}}}')


def test_true_and_false_are_schemas() -> None:
    assert accepts(compiled(json="true").new_matcher(), '[1,"a"]')
    with pytest.raises(InvalidRequestError, match="false"):
        compiled(json="false")
