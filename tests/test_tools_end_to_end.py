"""Tool calls of the real model, through the real server, as the real client reads them."""

from __future__ import annotations

import asyncio
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs
import jsonschema
import openai
import pytest

from served import MODEL, ServedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

WEATHER = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "place": {"$ref": "#/$defs/Place"},
        "unit": {"enum": ["°C", "°F"]},
    },
    "required": ["days", "place", "unit"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}
STEPS = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"tool": {"enum": ["a{", 'b"', "c\\"]}},
                "required": ["tool"],
                "additionalProperties": False,
            },
            "minItems": 2,
            "maxItems": 2,
        }
    },
    "required": ["steps"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "plan": STEPS, "list_files": NOTHING}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
REQUEST: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "How will the weather be in Paris?"}],
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 128,
}
CHOICES: dict[str, dict[str, Any]] = {
    "one of all": {"tool_choice": "required", "parallel_tool_calls": False},
    # At temperature 0 so small a model calls the same function again and again.
    "several": {"tool_choice": "required", "tools": TOOLS[::2], "temperature": 1.0, "seed": 7},
    "several choices": {
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 3, "n": 2,
    },
    **{name: {"tool_choice": {"type": "function", "function": {"name": name}}} for name in SCHEMAS},
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CHOICES)


@attrs.frozen
class Answers:
    """To one request, in the three ways in which the client gives them."""

    whole: Any
    chunks: list[Any]
    events: list[Any]
    """Of the client's own reader of streams."""
    accumulated: Any
    """What that has put together."""


@pytest.fixture(scope="module")
def answers(server: ServedModel) -> dict[str, Answers]:
    return asyncio.run(ask_all(server))


async def ask_all(server: ServedModel) -> dict[str, Answers]:
    """All at once, as that is much faster."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = await asyncio.gather(*(ask(client, REQUEST | fields) for fields in CHOICES.values()))
    return dict(zip(CHOICES, found, strict=True))


async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> Answers:
    create = client.chat.completions.create
    whole, chunks, (events, accumulated) = await asyncio.gather(
        create(**fields), read_chunks(client, fields), read_events(client, fields)
    )
    return Answers(whole, chunks, events, accumulated)


async def read_chunks(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> list[Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with await client.chat.completions.create(**fields, **options) as stream:
        return [chunk async for chunk in stream]


async def read_events(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> tuple[list[Any], Any]:
    async with client.chat.completions.stream(**fields) as stream:
        return [event async for event in stream], await stream.get_final_completion()


@pytest.fixture
def client(server: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


Calls = list[tuple[str, str]]
"""(name, text of the arguments) of each."""


def calls_of(completion: Any) -> dict[int, Calls]:
    """By choice."""
    return {
        choice.index: [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        for choice in completion.choices
    }


@EACH
def test_calls_are_valid(answers: dict[str, Answers], name: str) -> None:
    choices = answers[name].whole.choices
    assert sorted(choice.index for choice in choices) == list(range(CHOICES[name].get("n", 1)))
    for choice in choices:
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.id.startswith("call_")
            assert call.function.name == name or name not in SCHEMAS
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        assert len(choice.message.tool_calls) == 1 or name == "several"


@EACH
def test_a_stream_makes_the_same_calls(answers: dict[str, Answers], name: str) -> None:
    *chunks, last = answers[name].chunks
    found: dict[int, Calls] = {choice.index: [] for choice in answers[name].whole.choices}
    reasons: dict[int, list[str | None]] = {index: [] for index in found}
    for chunk in chunks:
        (choice,) = chunk.choices
        reasons[choice.index].append(choice.finish_reason)
        calls = found[choice.index]
        for call in choice.delta.tool_calls or ():
            if call.function.name is not None:
                assert (call.index, bool(call.id), call.type) == (len(calls), True, "function")
                calls.append((call.function.name, ""))
            function, arguments = calls[call.index]
            calls[call.index] = (function, arguments + call.function.arguments)
    assert found == calls_of(answers[name].whole)
    assert all(told == [None] * (len(told) - 1) + ["tool_calls"] for told in reasons.values())
    assert last.usage.completion_tokens == answers[name].whole.usage.completion_tokens
    assert last.usage.prompt_tokens == answers[name].whole.usage.prompt_tokens


@EACH
def test_the_clients_own_reader_of_streams(answers: dict[str, Answers], name: str) -> None:
    """It puts the deltas together, and parses the arguments of each call as they come."""
    accumulated = answers[name].accumulated
    calls = calls_of(accumulated)
    assert calls == calls_of(answers[name].whole)
    assert {choice.finish_reason for choice in accumulated.choices} == {"tool_calls"}
    assert {choice.message.content for choice in accumulated.choices} == {None}
    done = [event for event in answers[name].events if event.type == "tool_calls.function.arguments.done"]
    assert sorted((event.name, event.arguments) for event in done) == sorted(chain(*calls.values()))
    assert all(event.parsed_arguments == json.loads(event.arguments) for event in done)


def test_a_call_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    fields = {**REQUEST, **CHOICES["get_weather"], "max_tokens": 5}
    (choice,) = client.chat.completions.create(**fields).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


def test_a_conversation_goes_on_with_the_result(client: openai.OpenAI, answers: dict[str, Answers]) -> None:
    message = answers["get_weather"].whole.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 25 °C."}
    messages = [*REQUEST["messages"], message.to_dict(), result]
    fields = REQUEST | {"messages": messages, "tool_choice": "none", "max_tokens": 8}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_a_schema_that_cannot_be_used_names_the_tools(client: openai.OpenAI) -> None:
    broken = {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": broken}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**REQUEST | {"tools": tools, "tool_choice": "required"})
    assert caught.value.param == "tools"
    assert "missing" in str(caught.value)
