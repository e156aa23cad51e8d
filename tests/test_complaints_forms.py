"""Complaints 16, 19, 20 and 30: grammars, schemas, and tool calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from trio.testing import wait_all_tasks_blocked

from helpers_complaints import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    QUESTION,
    Caller,
    ask_together,
    choices_of,
    http_request,
    openai_client,
    parse_events,
    text_of,
    until,
)
from helpers_http import serving
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app

if TYPE_CHECKING:
    from fake_engine import FakeEngine
    from helpers_http import Server
    from served import ServedModel


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# Complaint 16: a bad JSON schema, regex or grammar is a 400 to that client only

BAD_FORMS: list[dict[str, Any]] = [
    {"response_format": json_schema({"type": "nonsense"})},
    {"response_format": json_schema({"type": "string", "pattern": "("})},
    {"response_format": json_schema({"$ref": "#/$defs/missing"})},
    {"structured_outputs": {"regex": "(["}},
    {"structured_outputs": {"grammar": "root ::= ("}},
    {"structured_outputs": {"json": '{"type": '}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
]


def test_complaint_16_a_bad_form_is_a_400_to_that_client_only(server: ServedModel) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True, "stream": True}
    (alone,) = ask_together(server, (COMPLETIONS, body))
    neighbour = Caller(server, COMPLETIONS, {**GREEDY, **body})
    neighbour.read_until(b"data: ")
    for form in BAD_FORMS:
        status, answer = server.request("POST", CHAT, {**GREEDY, "messages": QUESTION, **form})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), form
        assert answer["error"]["param"].split(".")[0] in form
    status, text = neighbour.read_to_end()
    assert status == 200
    assert text_of(parse_events(text)) == text_of(alone)
    assert server.request("GET", "/health")[0] == 200


# Complaint 19: the joined deltas of a tool call are the non-streamed arguments, for every split of the text

NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NUMBERS = {
    "type": "object",
    "properties": {"count": {"type": "integer", "maximum": 99}, "unit": {"enum": ["m", "km"]}},
    "required": ["count", "unit"],
    "additionalProperties": False,
}
ARRAYS = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"do": {"enum": ["{go}", 'say "é"']}, "times": {"enum": [1, 2]}},
                "required": ["do", "times"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["steps"],
    "additionalProperties": False,
}
SCHEMAS = {"now": NOTHING, "walk": NUMBERS, "plan": ARRAYS}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
GENERATED = {
    "now": "{}",
    "walk": '{"count": -12, "unit": "km"}',
    "plan": '{"steps": [{"do": "say \\"é\\"", "times": 2}, {"do": "{go}"}]}',
}
"""Arguments as a model may write them."""


def calling(name: str | None, **fields: Any) -> dict[str, Any]:
    """A request that must be answered by a call of this tool, or of any."""
    choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
    tools = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    return {"messages": [{"role": "user", "content": "Hi"}], **tools, **fields}


def joined_calls(choices: list[Any]) -> list[tuple[str, str]]:
    """Of a stream's chunks: name and arguments of each call, put together as OpenAI's clients do it."""
    calls: list[tuple[str, str]] = []
    for choice in choices:
        for delta in choice["delta"].get("tool_calls") or ():
            if delta["index"] == len(calls):
                assert delta["type"] == "function"
                assert delta["id"]
                calls.append((delta["function"]["name"], ""))
            name, arguments = calls[delta["index"]]
            calls[delta["index"]] = (name, arguments + delta["function"].get("arguments", ""))
    return calls


def whole_calls(choice: Any) -> list[tuple[str, str]]:
    calls = choice["message"]["tool_calls"]
    assert all(call["type"] == "function" and call["id"] for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


async def generate(fake: FakeEngine, server: Server, request: dict[str, Any], pieces: list[bytes]) -> bytes:
    """The reply to a request whose answer the engine generates in these pieces."""
    num_before = len(fake.client.added)
    client = await server.connect()
    await client.send(http_request(CHAT, request))
    await until(lambda: len(fake.client.added) > num_before)
    add = fake.client.added[-1]
    for piece in pieces:
        fake.client.emit(add, piece)
        await wait_all_tasks_blocked()
    fake.client.emit(add, b"", FinishReason.STOP)
    reply = await client.read_reply()
    client.close()
    assert reply.status == 200, reply
    return reply.body


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "required"])
async def test_complaint_19_for_every_split_of_the_text(fake: FakeEngine, name: str, is_named: bool) -> None:
    arguments = GENERATED[name]
    text = arguments if is_named else f'[{{"name": "{name}", "arguments": {arguments}}}]'
    data = text.encode()
    splits = [[data[:at], data[at:]] for at in range(1, len(data))] + [[bytes([byte]) for byte in data]]
    request = calling(name if is_named else None)
    async with serving(create_app(fake.llm)) as server:
        (whole,) = json.loads(await generate(fake, server, request, [data]))["choices"]
        assert whole_calls(whole) == [(name, arguments)]
        for pieces in splits:
            body = await generate(fake, server, {**request, "stream": True}, pieces)
            assert joined_calls(choices_of(parse_events(body.decode()))) == [(name, arguments)], pieces


@pytest.mark.parametrize("name", ["now", "plan", None])
def test_complaint_19_streamed_calls_of_a_model_are_those_not_streamed(
    server: ServedModel, name: str | None
) -> None:
    request = calling(name, max_tokens=100)
    whole, events = ask_together(server, (CHAT, request), (CHAT, {**request, "stream": True}))
    (choice,) = whole["choices"]
    calls = whole_calls(choice)
    assert joined_calls(choices_of(events)) == calls
    ((called, arguments),) = calls
    assert called == name or name is None
    jsonschema.validate(json.loads(arguments), SCHEMAS[called])
    # Complaint 20, of the same answers
    reasons = [chunk["finish_reason"] for chunk in choices_of(events)]
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]


# Complaint 20: finish_reason "tool_calls" on the last chunk only, the same as non-streaming


@pytest.mark.parametrize("name", ["now", None], ids=["named", "required"])
def test_complaint_20_the_finish_reason_is_tool_calls_at_the_end(
    server: ServedModel, name: str | None
) -> None:
    request = calling(name, max_tokens=100)
    with openai_client(server) as client:
        whole = client.chat.completions.create(**GREEDY | request)
        with client.chat.completions.stream(**GREEDY | request) as stream:
            streamed = [event.chunk.choices[0].finish_reason for event in stream if event.type == "chunk"]
            final = stream.get_final_completion().choices[0]
    assert whole.choices[0].finish_reason == final.finish_reason == "tool_calls"
    assert streamed == [None] * (len(streamed) - 1) + ["tool_calls"]
    assert whole.choices[0].message.content is None


def test_complaint_20_a_call_that_was_cut_off_does_not_look_whole(server: ServedModel) -> None:
    request = calling("plan", max_tokens=4)
    whole, events = ask_together(server, (CHAT, request), (CHAT, {**request, "stream": True}))
    reasons = [chunk["finish_reason"] for chunk in choices_of(events)]
    assert whole["choices"][0]["finish_reason"] == reasons[-1] == "length"


# Complaint 30: n > 1 with a JSON schema: each choice valid, one finish reason each, usage sums right

ANIMAL = {
    "type": "object",
    "properties": {"animal": {"enum": ["dog", "cat", "horse", "duck"]}, "legs": {"enum": [2, 4]}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


def test_complaint_30_each_of_n_choices_is_valid_and_the_sums_are_right(server: ServedModel) -> None:
    form = {"structured_outputs": {"json": ANIMAL, "disable_any_whitespace": True}}
    asked = {"messages": QUESTION, "n": 4, "temperature": 1.2, "seed": 30, "max_tokens": 60, **form}
    body = {**asked, "return_token_ids": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    whole, events = ask_together(server, (CHAT, body), (CHAT, {**body, **options}))
    assert sorted(choice["index"] for choice in whole["choices"]) == [0, 1, 2, 3]
    for choice in whole["choices"]:
        index, text = choice["index"], choice["message"]["content"]
        jsonschema.validate(json.loads(text), ANIMAL)
        assert choice["finish_reason"] == "stop"
        assert text_of(events, index) == text
        reasons = [chunk["finish_reason"] for chunk in choices_of(events, index)]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) > 1
    usage = whole["usage"]
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert events[-2]["usage"] == usage


def test_complaint_30_by_response_format(server: ServedModel) -> None:
    asked = {"messages": QUESTION, "n": 3, "temperature": 1.2, "seed": 31, "max_tokens": 100}
    (answer,) = ask_together(server, (CHAT, {**asked, "response_format": json_schema(ANIMAL)}))
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), ANIMAL)
