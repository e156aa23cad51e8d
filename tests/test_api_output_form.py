"""`response_format` and `structured_outputs`: what reaches the engine, and how it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers_api import Answer, Client, FakeLLM, Reply
from trioserve.errors import InvalidRequestError
from trioserve.structured_outputs import StructuredOutputsParams

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}
BORN = {"properties": {"born": {"type": "string"}}}
NEEDS_OTHERS: list[dict[str, Any]] = [
    {**NAMED, "anyOf": [BORN, {"properties": {"age": {"type": "integer"}}}]},
    {**NAMED, "required": ["name", "born"]},
    {**NAMED, "minProperties": 2},
    {"$defs": {"born": BORN}, **NAMED, "$ref": "#/$defs/born"},
    {"$defs": {"named": NAMED}, "allOf": [{"$ref": "#/$defs/named"}, BORN]},
    {"type": "array", "items": {**NAMED, "required": ["born"]}},
]
"""Their objects have properties beside those that one place names."""


async def ask(llm: FakeLLM, path: str, **request: Any) -> Reply:
    prompt = {"prompt": "Hi"} if path == TEXT else {"messages": [{"role": "user", "content": "Hi"}]}
    return await Client(llm).post(path, prompt | request)


@BOTH
@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
            StructuredOutputsParams(json=json.dumps(SCHEMA), disable_additional_properties=True),
        ),
    ],
)
async def test_response_formats(path: str, response_format: Any, expected: Any) -> None:
    llm = FakeLLM()
    assert (await ask(llm, path, response_format=response_format)).status == 200
    assert llm.calls[0].params.structured_outputs == expected


@pytest.mark.parametrize("schema", NEEDS_OTHERS)
async def test_objects_are_not_closed_that_need_others(schema: dict[str, Any]) -> None:
    llm = FakeLLM()
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert (await ask(llm, CHAT, response_format=response_format)).status == 200
    assert llm.calls[0].params.structured_outputs == StructuredOutputsParams(json=json.dumps(schema))


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]},
        {"format": {"type": "json_schema", "json_schema": SCHEMA}},
    ],
)
async def test_a_structural_tag_reaches_the_engine_as_it_is(tag: dict[str, Any]) -> None:
    llm = FakeLLM()
    assert (await ask(llm, CHAT, response_format={"type": "structural_tag", **tag})).status == 200
    form = llm.calls[0].params.structured_outputs
    assert form is not None
    assert json.loads(form.structural_tag or "") == {"type": "structural_tag", **tag}


@BOTH
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": SCHEMA}, {"json": json.dumps(SCHEMA)}),
        ({"json": '{"type": "string"}'}, {"json": '{"type": "string"}'}),
        ({"json_object": True, "regex": None}, {"json_object": True}),
        ({"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"choice": ["yes", "no"]}, {"choice": ("yes", "no")}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structural_tag": {"format": {}}}, {"structural_tag": '{"format": {}}'}),
        (
            {
                "json": SCHEMA,
                "disable_any_whitespace": True,
                "disable_additional_properties": True,
                "whitespace_pattern": " *",
            },
            {
                "json": json.dumps(SCHEMA),
                "disable_any_whitespace": True,
                "disable_additional_properties": True,
                "whitespace_pattern": " *",
            },
        ),
    ],
)
async def test_structured_outputs(path: str, given: Any, expected: dict[str, Any]) -> None:
    llm = FakeLLM()
    request = {"structured_outputs": given, "response_format": {"type": "text"}}
    assert (await ask(llm, path, **request)).status == 200
    assert llm.calls[0].params.structured_outputs == StructuredOutputsParams(**expected)


@BOTH
@pytest.mark.parametrize(
    ("request_fields", "param", "text"),
    [
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}},
            "response_format.json_schema.schema",
            "'{}'",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format", "structures"),
        ({"structured_outputs": "json"}, "structured_outputs", "object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, "),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"jsno": {}, "regex": "a"}}, "structured_outputs", "'jsno'"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "non-empty"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice", "list of strings"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON schema"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format",
            "structured_outputs",
        ),
    ],
)
async def test_what_makes_no_sense_names_the_field(
    path: str, request_fields: dict[str, Any], param: str, text: str
) -> None:
    llm = FakeLLM()
    reply = await ask(llm, path, **request_fields)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["param"] == param
    assert text in reply.error["message"]
    assert not llm.calls


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs"),
        (
            {"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}},
            "structured_outputs",
        ),
    ],
)
async def test_a_grammar_that_the_core_refuses_is_a_400_under_the_clients_name(
    path: str, stream: bool, form: dict[str, Any], field: str
) -> None:
    error = InvalidRequestError("structured_outputs is too large.", parameter="structured_outputs")
    llm = FakeLLM(Answer(token_ids=(), error=error))
    reply = await ask(llm, path, stream=stream, **form)
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", field)
    assert reply.error["message"] == f"{field} is too large."
    assert not llm.running


async def test_tools_and_a_form_do_not_get_in_each_others_way() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = {"tools": tools, "response_format": {"type": "json_object"}}
    assert (await ask(FakeLLM(), CHAT, **request, tool_choice="none")).status == 200
    reply = await ask(FakeLLM(), CHAT, **request, tool_choice="required")
    assert (reply.status, reply.error["param"]) == (400, "response_format")
