"""The forms of answers that are tool calls: what a model can write in them, drawn at random."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from helpers_grammars import accepts, compiled, smollm2, tokenizer, walk
from trioserve.config import StructuredOutputsConfig
from trioserve.grammars.checking import Setup, check
from trioserve.parsers.forced_calls import CallScanner
from trioserve.server.protocol.tool_schemas import MAX_CALLS, arguments_form, calls_form
from trioserve.server.protocol.tools import FunctionDefinition

if TYPE_CHECKING:
    from trioserve.structured_outputs import StructuredOutputsParams

SEEDS = range(6)
INTEGER, SHORT = {"type": "integer"}, {"type": "string", "maxLength": 5}


def schema(**keywords: Any) -> dict[str, Any]:
    """Of an object; required are all of its properties."""
    return {"type": "object", "required": [*keywords.get("properties", ())], **keywords}


SCHEMAS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "empty": {},
    "no_properties": schema(properties={}),
    "no_type": {"properties": {"a": INTEGER}, "required": ["a"]},
    "integer_first": schema(properties={"count": INTEGER, "unit": {"enum": ["C", "F"]}}),
    "objects": schema(
        properties={"steps": {"type": "array", "items": schema(properties={"id": INTEGER}), "maxItems": 2}}
    ),
    "definitions": schema(
        properties={"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#/$defs/A/properties/x"}},
        **{"$defs": {"A": schema(properties={"x": {"$ref": "#/$defs/X"}}), "X": INTEGER}},
    ),
    "other_definitions": schema(
        properties={"a": {"$ref": "#/$defs/A"}}, **{"$defs": {"A": {"enum": ["x", "y"]}, "X": SHORT}}
    ),
    "draft_7": schema(
        **{"$schema": "http://json-schema.org/draft-07/schema#"},
        properties={"a": {"$ref": "#/definitions/A"}},
        definitions={"A": INTEGER},
    ),
    "itself": schema(properties={"value": INTEGER, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
    "root_reference": {"$ref": "#/$defs/A", "$defs": {"A": schema(properties={"x": INTEGER})}},
    "own_resource": schema(
        **{"$id": "https://example.com/tool", "$defs": {"A": INTEGER}},
        properties={"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "https://example.com/tool#/$defs/A"}},
    ),
    "names_like_keywords": schema(
        properties={"$ref": {"$ref": "#/$defs/const"}, "const": {"$ref": "#/$defs/const"}, "items": INTEGER},
        **{"$defs": {"const": {"const": {"$ref": "#"}}}},
    ),
    "alternatives": schema(
        properties={"kind": {"enum": ["a", "b"]}},
        anyOf=[schema(properties={"x": INTEGER}), schema(properties={"y": {"const": 1}})],
    ),
}
FUNCTIONS = {name: FunctionDefinition(name=name, parameters=given) for name, given in SCHEMAS.items()}


def draw(form: StructuredOutputsParams, seed: int) -> str:
    verdict = check(Setup(model=smollm2(), config=StructuredOutputsConfig()), tokenizer(), form)
    assert verdict.refused is None, verdict.refused
    text = walk(grammar(form).new_matcher(), seed)
    assert text is not None, "it comes to no end"
    return text


def grammar(form: StructuredOutputsParams) -> Any:
    return compiled(json=form.json, disable_additional_properties=form.disable_additional_properties)


def assert_called_rightly(name: str, arguments: Any) -> None:
    assert isinstance(arguments, dict)
    jsonschema.validate(arguments, SCHEMAS[name] or {}, jsonschema.Draft202012Validator)
    if name in {"nothing", "empty", "no_properties"}:
        assert arguments == {}


@pytest.mark.parametrize("name", SCHEMAS)
def test_arguments_of_a_named_function(name: str) -> None:
    for seed in SEEDS:
        text = draw(arguments_form(FUNCTIONS[name]), seed)
        assert_called_rightly(name, json.loads(text))
        scanner = CallScanner(name)
        assert "".join(part.arguments for part in scanner.feed(text)) == text
        assert scanner.has_called


@pytest.mark.parametrize("name", SCHEMAS)
def test_calls_of_one_function_or_another(name: str) -> None:
    """References stay within the schema that they are in: others have the same names in it."""
    others = [FUNCTIONS["definitions"], FUNCTIONS["other_definitions"]]
    functions = [FUNCTIONS[name], *(other for other in others if other.name != name)]
    called = set()
    for seed in SEEDS:
        text = draw(calls_form(functions, max_calls=2), seed)
        calls = json.loads(text)
        assert 1 <= len(calls) <= 2
        for call in calls:
            assert list(call) == ["name", "arguments"]
            assert_called_rightly(call["name"], call["arguments"])
            called.add(call["name"])
        assert_scanned_alike(text, calls)
    assert called <= {function.name for function in functions}


def assert_scanned_alike(text: str, calls: list[Any]) -> None:
    scanner = CallScanner()
    found: list[tuple[str, str]] = []
    for part in scanner.feed(text):
        found = [*found, (part.name, "")] if part.name else found
        found[-1] = (found[-1][0], found[-1][1] + part.arguments)
    assert scanner.has_called
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        (call["name"], call["arguments"]) for call in calls
    ]


def test_every_function_can_be_called() -> None:
    matcher = grammar(calls_form([*FUNCTIONS.values()], max_calls=1))
    for name in FUNCTIONS:
        assert accepts(matcher.new_matcher(), f'[{{"name": "{name}", "arguments": {example(name)}}}]'), name


def example(name: str) -> str:
    text = walk(grammar(arguments_form(FUNCTIONS[name])).new_matcher(), 0)
    assert text is not None
    return text


@pytest.mark.parametrize("max_calls", [1, 3, MAX_CALLS])
def test_the_number_of_calls_is_bounded(max_calls: int) -> None:
    matcher = grammar(calls_form([FUNCTIONS["nothing"]], max_calls=max_calls))
    call = '{"name": "nothing", "arguments": {}}'
    for number in (0, 1, max_calls, max_calls + 1):
        text = "[" + ", ".join([call] * number) + "]"
        assert accepts(matcher.new_matcher(), text) == (1 <= number <= max_calls), number


def test_other_arguments_only_where_the_schema_says_so() -> None:
    for extra, allowed in ((None, False), (True, True), (INTEGER, True)):
        own = {} if extra is None else {"additionalProperties": extra}
        function = FunctionDefinition(name="f", parameters=schema(properties={"a": INTEGER}, **own))
        assert accepts(grammar(arguments_form(function)).new_matcher(), '{"a": 1, "b": 2}') == allowed


def test_what_no_grammar_can_say_is_left_to_the_model_unless_strict() -> None:
    odd = schema(properties={"url": {"type": "string", "format": "int32"}}, **{"if": {}, "then": {}})
    setup = Setup(model=smollm2(), config=StructuredOutputsConfig())
    for strict, is_served in ((None, True), (False, True), (True, False)):
        function = FunctionDefinition(name="f", parameters=odd, strict=strict)
        for form in (arguments_form(function), calls_form([FUNCTIONS["nothing"], function], max_calls=1)):
            assert (check(setup, tokenizer(), form).refused is None) == is_served
