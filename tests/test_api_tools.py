"""Tools in chat completions: what reaches the engine, the calls of an answer, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any, TypeVar

import jsonschema
import msgspec
import pytest

import helpers_api
from helpers_api import VOCABULARY, Answer, Call, Client, FakeLLM, Reply
from trioserve.errors import InvalidRequestError
from trioserve.outputs import FinishReason
from trioserve.server.openapi import Description
from trioserve.server.openapi_routes import ROUTES
from trioserve.server.protocol.readers import MAX_TOOLS

T = TypeVar("T")

PATH = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Now.", "parameters": CITY, "strict": True},
}
FILES = {"type": "function", "function": {"name": "list_files"}}
TOOLS = [WEATHER, FILES]
REQUIRED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
NAMED: dict[str, Any] = {
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
}

ARGUMENTS = ['{"city": "\U0001fae0 {\\"[\\\\"}', "{}", '{"n":1,"of":[{"a":[]},{"b":"}"}]}']
NAMES = ["get_weather", "list_files", "get_weather"]
CALLS = list(zip(NAMES, ARGUMENTS, strict=True))
ANSWER = "[" + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in CALLS) + "]"


async def ask(llm: FakeLLM, **request: Any) -> Reply:
    message = {"role": "user", "content": "Hi there"}
    return await Client(llm).post(PATH, {"messages": [message], "max_tokens": 500} | request)


class Speaker:
    """Makes engines whose answers are the pieces of given texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._vocabulary = [*VOCABULARY]
        monkeypatch.setattr(helpers_api, "VOCABULARY", self._vocabulary)

    def say(self, pieces: list[str], reason: FinishReason = FinishReason.STOP) -> Answer:
        first = len(self._vocabulary)
        self._vocabulary += [piece.encode() for piece in pieces]
        return Answer(token_ids=tuple(range(first, len(self._vocabulary))), reason=reason)


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Speaker:
    return Speaker(monkeypatch)


def split(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def calls_of(message: Any) -> list[tuple[str, str]]:
    assert message["content"] is None
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]


def choices_of(reply: Reply, index: int = 0) -> list[Any]:
    """Of a stream: one choice's chunks, in their order."""
    assert reply.status == 200, reply.error
    assert all(len(event["choices"]) <= 1 for event in reply.events[:-1])
    choices = [choice for event in reply.events[:-1] for choice in event["choices"]]
    return [choice for choice in choices if choice["index"] == index]


def streamed_calls(choices: list[Any]) -> list[tuple[str, str]]:
    """What a client makes of the deltas, by OpenAI's rules for them."""
    first, *others = [choice["delta"] for choice in choices]
    assert first == {"role": "assistant", "content": None, "refusal": None}
    calls: list[list[str]] = []
    ids = set()
    for delta in others:
        assert delta.keys() <= {"tool_calls"}
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                ids.add(call["id"])
                calls.append([call["function"]["name"], ""])
            else:
                assert call["index"] == len(calls) - 1
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                assert call["function"]["arguments"]
            calls[-1][1] += call["function"]["arguments"]
    assert len(ids) == len(calls)
    assert all(len(delta.get("tool_calls", ())) <= 1 for delta in others)
    return [(name, arguments) for name, arguments in calls]


def finish_reason(choices: list[Any]) -> str:
    *before, last = [choice["finish_reason"] for choice in choices]
    assert before == [None] * len(before), "only the last chunk has one"
    assert isinstance(last, str)
    return last


# Whole replies


async def test_required_calls(speaker: Speaker) -> None:
    reply = (await ask(FakeLLM(speaker.say(split(ANSWER, [7, 30]))), **REQUIRED)).json
    (choice,) = reply["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal", "annotations", "tool_calls"}
    assert calls_of(choice["message"]) == CALLS
    for call in choice["message"]["tool_calls"]:
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == len(CALLS)
    assert (choice["finish_reason"], choice["logprobs"]) == ("tool_calls", None)
    assert reply["usage"]["completion_tokens"] == 3


async def test_a_named_function(speaker: Speaker) -> None:
    reply = (await ask(FakeLLM(speaker.say(['{"city"', ':"Rome"}'])), **NAMED)).json
    (choice,) = reply["choices"]
    assert calls_of(choice["message"]) == [("get_weather", '{"city":"Rome"}')]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["none", None])
async def test_without_a_call_text_is_text(speaker: Speaker, choice: str | None) -> None:
    """Even if it looks like a call."""
    tools = {"tools": TOOLS} if choice == "none" else {}
    llm = FakeLLM(speaker.say([ANSWER]))
    (answered,) = (await ask(llm, tool_choice=choice, **tools)).json["choices"]
    assert answered["message"]["content"] == ANSWER
    assert "tool_calls" not in answered["message"]
    assert answered["finish_reason"] == "stop"
    assert llm.calls[0].params.structured_outputs is None


# Streams


@pytest.mark.parametrize("request_fields", [REQUIRED, NAMED])
async def test_a_stream_makes_the_same_calls_wherever_it_is_split(
    speaker: Speaker, request_fields: dict[str, Any]
) -> None:
    text = ANSWER if request_fields is REQUIRED else ARGUMENTS[0]
    draw = random.Random(2)
    splits = [draw.choices(range(len(text)), k=draw.randrange(1, 9)) for _ in range(10)]
    for places in [[], [*range(1, len(text))], *splits]:
        llm = FakeLLM(speaker.say(split(text, places)))
        whole = (await ask(llm, **request_fields)).json
        streamed = await ask(llm, stream=True, stream_options={"include_usage": True}, **request_fields)
        choices = choices_of(streamed)
        assert streamed_calls(choices) == calls_of(whole["choices"][0]["message"])
        assert finish_reason(choices) == whole["choices"][0]["finish_reason"] == "tool_calls"
        assert choices[-1]["delta"] == {}
        *others, last = streamed.events[:-1]
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert [event["usage"] for event in others] == [None] * len(others)


async def test_the_chunks_of_a_stream(speaker: Speaker) -> None:
    llm = FakeLLM(
        speaker.say(['[{"name": "list_files", "argu', 'ments": {"a', '": 1}}, {"name": "x"', "", "}]"])
    )
    choices = choices_of(await ask(llm, stream=True, **REQUIRED))
    deltas = [choice["delta"] for choice in choices]
    identity = {"type": "function", "id": deltas[1]["tool_calls"][0]["id"]}
    assert deltas[:4] == [
        {"role": "assistant", "content": None, "refusal": None},
        {"tool_calls": [{"index": 0, **identity, "function": {"name": "list_files", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
    ]
    assert deltas[4]["tool_calls"][0]["index"] == 1
    assert deltas[5:] == [{}]


async def test_each_choice_has_its_own_calls(speaker: Speaker) -> None:
    answers = [
        speaker.say(split(ANSWER, [*range(5, len(ANSWER), 3)])),
        speaker.say(["[", '{"name":"list_files","arguments":{', "}}", "]"]),
        speaker.say(['[{"name":"get_weather","arguments":{"ci'], FinishReason.LENGTH),
    ]

    def script(_call: Call, index: int) -> Answer:
        return answers[index]

    whole = (await ask(FakeLLM(script), n=3, **REQUIRED)).json
    expected = [CALLS, [("list_files", "{}")], [("get_weather", '{"ci')]]
    assert [calls_of(choice["message"]) for choice in whole["choices"]] == expected
    streamed = await ask(FakeLLM(script), n=3, stream=True, **REQUIRED)
    reasons = ["tool_calls", "tool_calls", "length"]
    for index in range(3):
        choices = choices_of(streamed, index)
        assert streamed_calls(choices) == expected[index]
        assert finish_reason(choices) == whole["choices"][index]["finish_reason"] == reasons[index]
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids) == 5


# Ends


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[", []),
        ('[{"name": "get_w', []),
        ('[{"name": "get_weather"', [("get_weather", "")]),
        ('[{"name": "get_weather", "arguments": {"city": "Ro', [("get_weather", '{"city": "Ro')]),
        (
            '[{"name": "list_files", "arguments": {}}, {"name": "get_weather", "ar',
            [("list_files", "{}"), ("get_weather", "")],
        ),
    ],
)
@pytest.mark.parametrize(
    ("reason", "told"),
    [(FinishReason.LENGTH, "length"), (FinishReason.STOP, "stop")],
    ids=["limit", "stop string"],
)
async def test_an_answer_that_was_cut_off(
    speaker: Speaker, text: str, calls: list[tuple[str, str]], reason: FinishReason, told: str
) -> None:
    """The calls are incomplete, and the reason says so: nobody is to execute them."""
    llm = FakeLLM(speaker.say(split(text, [1]), reason))
    (choice,) = (await ask(llm, **REQUIRED)).json["choices"]
    assert (calls_of(choice["message"]), choice["finish_reason"]) == (calls, told)
    choices = choices_of(await ask(llm, stream=True, **REQUIRED))
    assert (streamed_calls(choices), finish_reason(choices)) == (calls, told)


async def test_a_limit_at_the_very_end_is_still_a_limit(speaker: Speaker) -> None:
    llm = FakeLLM(speaker.say(["{", "}"], FinishReason.LENGTH))
    assert (await ask(llm, **NAMED)).json["choices"][0]["finish_reason"] == "length"
    assert finish_reason(choices_of(await ask(llm, stream=True, **NAMED))) == "length"


async def test_an_answer_that_the_server_ended_is_an_error(speaker: Speaker) -> None:
    llm = FakeLLM(speaker.say(['{"city"', ":"], FinishReason.ABORT))
    assert (await ask(llm, **NAMED)).status == 503
    events = (await ask(llm, stream=True, **NAMED)).events
    assert events[-2]["error"]["code"] == "aborted"


# Logprobs and token ids


async def test_every_token_has_its_logprobs(speaker: Speaker) -> None:
    """Also those of the text around the calls: what was asked for is never dropped."""
    pieces = split(ANSWER, [1, 5, 20, 21, 22, 60])
    llm = FakeLLM(speaker.say(pieces))
    fields = {"logprobs": True, "return_token_ids": True, **REQUIRED}
    (choice,) = (await ask(llm, **fields)).json["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == pieces
    chunks = choices_of(await ask(llm, stream=True, **fields))
    rows = [row for chunk in chunks for row in (chunk["logprobs"] or {}).get("content", ())]
    assert rows == choice["logprobs"]["content"]
    assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == choice["token_ids"]
    assert streamed_calls(chunks) == CALLS


# What reaches the engine


def form_of(llm: FakeLLM) -> Any:
    form = llm.calls[0].params.structured_outputs
    assert form is not None
    assert form.disable_additional_properties
    return json.loads(form.json or "")


async def test_the_form_of_a_named_functions_arguments() -> None:
    llm = FakeLLM()
    await ask(llm, **NAMED)
    assert form_of(llm) == CITY  # strict: nothing of it may be passed over
    llm = FakeLLM()
    await ask(llm, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "list_files"}})
    assert not jsonschema.Draft202012Validator(form_of(llm)).is_valid([])
    assert jsonschema.Draft202012Validator(form_of(llm)).is_valid({})


@pytest.mark.parametrize(("parallel", "most"), [(None, 16), (True, 16), (False, 1)])
async def test_the_form_of_required_calls(parallel: bool | None, most: int) -> None:
    llm = FakeLLM()
    await ask(llm, parallel_tool_calls=parallel, **REQUIRED)
    validator = jsonschema.Draft202012Validator(form_of(llm))
    call = {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert validator.is_valid([call])
    assert validator.is_valid([call] * most)
    assert not validator.is_valid([call] * (most + 1))
    assert not validator.is_valid([])
    assert not validator.is_valid([call | {"name": "other"}])
    assert not validator.is_valid([call | {"arguments": {}}])
    assert not validator.is_valid([call | {"name": "list_files", "arguments": []}])


async def test_allowed_tools_are_all_that_there_are() -> None:
    llm = FakeLLM()
    await ask(llm, tools=TOOLS, tool_choice=allowing("required", ["list_files"]))
    validator = jsonschema.Draft202012Validator(form_of(llm))
    assert validator.is_valid([{"name": "list_files", "arguments": {}}])
    assert not validator.is_valid([{"name": "get_weather", "arguments": {"city": "Rome"}}])
    assert llm.rendered[0]["tools"] == [FILES]


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, REQUIRED, NAMED])
async def test_tools_reach_the_template_as_they_were_given(fields: dict[str, Any]) -> None:
    llm = FakeLLM()
    assert (await ask(llm, **fields)).status == 200
    assert llm.rendered[0]["tools"] == TOOLS
    assert [list(tool["function"]) for tool in llm.rendered[0]["tools"]] == [
        ["name", "description", "parameters", "strict"], ["name"],
    ]  # fmt: skip


async def test_a_call_comes_back_with_its_result(speaker: Speaker) -> None:
    llm = FakeLLM(speaker.say([ANSWER]))
    message = (await ask(llm, **REQUIRED)).json["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in message["tool_calls"]
    ]
    assert (await ask(llm, messages=[message, *results], tools=TOOLS, tool_choice="none")).status == 200
    rendered, *_ = llm.rendered[-1]["messages"]
    assert [call["function"]["arguments"] for call in rendered["tool_calls"]] == [
        json.loads(text) for text in ARGUMENTS
    ]


async def test_a_beam_search_finds_calls(speaker: Speaker) -> None:
    llm = FakeLLM(speaker.say(['{"city": "Rome"}']))
    (choice,) = (await ask(llm, use_beam_search=True, **NAMED)).json["choices"]
    assert calls_of(choice["message"]) == [("get_weather", '{"city": "Rome"}')]
    assert choice["finish_reason"] == "tool_calls"
    assert llm.searches[0].params.structured_outputs is not None


# What is refused


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


def choosing(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowing(mode: str, names: list[str]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [choosing(n) for n in names]}}


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tools": TOOLS, "tool_choice": True}, "tool_choice", "True"),
        ({"tools": TOOLS, "tool_choice": choosing("other")}, "tool_choice.function.name", "'other'"),
        ({"tools": TOOLS, "tool_choice": choosing(5)}, "tool_choice.function.name", "string"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.type", "'custom'"),
        ({"tools": TOOLS, "tool_choice": {"type": None}}, "tool_choice.type", "None"),
        (
            {"tools": TOOLS, "tool_choice": allowing("some", ["f"])},
            "tool_choice.allowed_tools.mode",
            "'some'",
        ),
        ({"tools": TOOLS, "tool_choice": allowing("auto", [])}, "tool_choice.allowed_tools.tools", "[]"),
        (
            {"tools": TOOLS, "tool_choice": allowing("auto", ["get_weather", "f"])},
            "tool_choice.allowed_tools.tools[1].function.name",
            "'f'",
        ),
        ({"tool_choice": allowing("auto", ["f"])}, "tool_choice", "tools"),
        (
            {**REQUIRED, "messages": [{"role": "assistant", "content": "a"}], "echo": True},
            "echo",
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": choosing("f")}, "tool_choice", "tools"),
        ({"tools": [], "tool_choice": "required"}, "tools", "at least one"),
        ({"tools": [FILES] * (MAX_TOOLS + 1), "tool_choice": "none"}, "tools", f"at most {MAX_TOOLS}"),
        ({"tools": {}}, "tools", "list"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0].function", "required"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "'custom'"),
        ({"tools": [FILES, function(name="")], "tool_choice": "none"}, "tools[1].function.name", "''"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "'a b'"),
        ({"tools": [function(name="é")]}, "tools[0].function.name", "a-z"),
        ({"tools": [function(name="a\n")]}, "tools[0].function.name", "a-z"),
        ({"tools": [function(name="a" * 65)]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [function(parameters="{}")]}, "tools[0].function.parameters", "object"),
        (
            {"tools": [function(parameters={"type": "array"})]},
            "tools[0].function.parameters.type",
            "'array'",
        ),
        ({"tools": [FILES, FILES], "tool_choice": "none"}, "tools[1].function.name", "'list_files'"),
        ({**REQUIRED, "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({**REQUIRED, "response_format": {"type": "json_object"}}, "response_format", "tool_choice"),
        ({**NAMED, "structured_outputs": {"regex": "a"}}, "structured_outputs", "tool_choice"),
    ],
)
async def test_what_makes_no_sense_names_the_field(fields: dict[str, Any], param: str, text: str) -> None:
    llm = FakeLLM()
    reply = await ask(llm, **fields)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["param"] == param
    assert param in reply.error["message"]
    assert text in reply.error["message"]
    assert not llm.calls
    assert not llm.rendered


@pytest.mark.parametrize(
    "fields",
    [
        {**REQUIRED, "response_format": {"type": "text"}},
        {**REQUIRED, "parallel_tool_calls": False},
        {**REQUIRED, "tools": [function(parameters={"properties": {}})]},
        {**REQUIRED, "tools": [function(name="a" * 64), function(name="get-it_2")]},
        {**REQUIRED, "tools": [function(description=None, parameters=None, strict=None)]},
        {"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}},
        {"tool_choice": "none", "parallel_tool_calls": True},
    ],
)
async def test_what_makes_sense(fields: dict[str, Any]) -> None:
    assert (await ask(FakeLLM(), **fields)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [REQUIRED, NAMED])
async def test_a_schema_that_the_core_refuses_is_a_400_of_the_tools(
    fields: dict[str, Any], stream: bool
) -> None:
    error = InvalidRequestError("structured_outputs cannot be used: why.", parameter="structured_outputs")
    reply = await ask(FakeLLM(Answer(token_ids=(), error=error)), stream=stream, **fields)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert reply.error["message"] == "tools cannot be used: why."


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"description": "x" * 2**20}, "1048576 bytes"),
        (json.loads('{"items":' * 63 + "{}" + "}" * 63), "64 deep"),
    ],
)
async def test_a_schema_that_is_too_large(parameters: dict[str, Any], text: str) -> None:
    llm = FakeLLM()
    tools = [function(parameters=parameters)]
    reply = await ask(llm, tools=tools, tool_choice="required")
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert text in reply.error["message"]
    assert not llm.calls


# The description


async def test_calls_are_as_the_server_describes_them(speaker: Speaker) -> None:
    document = Description(ROUTES, needs_key=False, open_paths=()).document()

    def check(name: str, value: Any) -> None:
        schema = {"components": document["components"], "$ref": f"#/components/schemas/{name}"}
        jsonschema.Draft202012Validator(schema).validate(value)

    llm = FakeLLM(speaker.say(split(ANSWER, [3, 30])))
    for fields in (REQUIRED, NAMED):
        check("ChatCompletionRequest", {"messages": [{"role": "user", "content": "Hi"}], **fields})
    check("ChatCompletion", (await ask(llm, **REQUIRED)).json)
    for event in (await ask(llm, stream=True, **REQUIRED)).events[:-1]:
        check("ChatCompletionChunk", event)
    assert msgspec.json.encode(document)
