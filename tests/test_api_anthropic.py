"""Anthropic's API: answers, their streams, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

import helpers_api
from helpers_anthropic import COUNT, PATH, accumulate, ask, events_of, request, without_ids
from helpers_api import VOCABULARY, Answer, Client, FakeLLM
from trioserve.errors import OverloadedError
from trioserve.outputs import FinishReason
from trioserve.server_args import ServerArgs

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Now.", "input_schema": CITY}
FILES = {"type": "custom", "name": "list_files", "input_schema": {"type": "object"}}
CALLS = '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "list_files", "arguments": {}}]'


def saying(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: FinishReason = FinishReason.STOP, size: int = 7
) -> FakeLLM:
    """An engine that says this, in tokens of so many characters."""
    pieces = [text[start : start + size].encode() for start in range(0, len(text), size)]
    monkeypatch.setattr(helpers_api, "VOCABULARY", [*VOCABULARY, *pieces])
    first = len(VOCABULARY)
    return FakeLLM(Answer(token_ids=tuple(range(first, first + len(pieces))), reason=reason))


# Answers


async def test_a_message() -> None:
    reply = await ask(FakeLLM(), "Say hello to me")
    assert reply.status == 200
    message = reply.json
    assert message["id"] == f"msg-{reply.headers['x-request-id']}"
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "small")
    assert message["content"] == [{"type": "text", "text": "Hello, world", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


async def test_cached_tokens_are_no_input_tokens() -> None:
    usage = (await ask(FakeLLM(), "Say hello to me")).json["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (4, 1)
    assert usage["output_tokens"] == 3


async def test_a_stream_says_the_same_as_a_message() -> None:
    whole, streamed = await ask(FakeLLM()), await ask(FakeLLM(), stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert without_ids(accumulate(streamed.body)) == without_ids(whole.json)


async def test_the_order_of_events() -> None:
    names = [name for name, _ in events_of((await ask(FakeLLM(), stream=True)).body)]
    assert names == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "stop_reason", "sequence"),
    [
        (Answer(stop_reason="END"), "stop_sequence", "END"),
        (Answer(stop_reason=7), "end_turn", None),
        (Answer(reason=FinishReason.LENGTH), "max_tokens", None),
    ],
)
async def test_why_it_stopped(answer: Answer, stop_reason: str, sequence: str | None, stream: bool) -> None:
    reply = await ask(FakeLLM(answer), stop_sequences=["END", "FIN"], stream=stream)
    message = accumulate(reply.body) if stream else reply.json
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, sequence)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_text_has_no_blocks(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(helpers_api, "VOCABULARY", [*VOCABULARY, b""])
    reply = await ask(FakeLLM(Answer(token_ids=(len(VOCABULARY),))), stream=stream)
    message = accumulate(reply.body) if stream else reply.json
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


# Tools


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_calls_of_tools(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    llm = saying(monkeypatch, CALLS, size=size)
    tools = {"tools": [WEATHER, FILES], "tool_choice": {"type": "any"}, "max_tokens": 500}
    message = (await ask(llm, **tools)).json
    assert message["stop_reason"] == "tool_use"
    blocks = [(block["type"], block["name"], block["input"]) for block in message["content"]]
    assert blocks == [("tool_use", "get_weather", {"city": "Paris"}), ("tool_use", "list_files", {})]
    assert len({block["id"] for block in message["content"]}) == 2
    streamed = await ask(llm, **tools, stream=True)
    assert without_ids(accumulate(streamed.body)) == without_ids(message)


async def test_a_call_that_was_cut_off_is_no_call_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = saying(monkeypatch, CALLS[:50], FinishReason.LENGTH)
    message = (await ask(llm, tools=[WEATHER], tool_choice={"type": "any"})).json
    assert (message["stop_reason"], message["content"][0]["input"]) == ("max_tokens", {})


async def test_one_call_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = saying(monkeypatch, CALLS)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = (await ask(llm, tools=[WEATHER, FILES], tool_choice=choice)).json
    assert [block["name"] for block in message["content"]] == ["get_weather"]


async def test_a_named_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = saying(monkeypatch, '{"city": "Rome"}')
    choice = {"type": "tool", "name": "get_weather"}
    message = (await ask(llm, tools=[WEATHER, FILES], tool_choice=choice)).json
    assert [block["input"] for block in message["content"]] == [{"city": "Rome"}]
    (call,) = llm.calls
    assert call.params.structured_outputs is not None
    assert json.loads(call.params.structured_outputs.json or "")["required"] == ["city"]


async def test_tools_are_shown_to_the_template() -> None:
    llm = FakeLLM()
    await ask(llm, tools=[WEATHER], tool_choice={"type": "none"})
    (shown,) = llm.rendered[0]["tools"]
    assert shown["function"] == {"name": "get_weather", "description": "Now.", "parameters": CITY}


# What reaches the engine


async def test_parameters() -> None:
    llm = FakeLLM()
    await ask(
        llm, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], metadata={"user_id": "me"},
        service_tier="auto", cache_salt="s", priority=3, vllm_xargs={"a": 1},
    )  # fmt: skip
    (call,) = llm.calls
    params = call.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (10, 0.5, 0.9, 7)
    assert (params.stop, params.extra_args) == (("END",), {"a": 1})
    assert (call.cache_salt, call.priority) == ("s", 3)


async def test_a_schema_of_the_answer() -> None:
    llm = FakeLLM()
    await ask(llm, output_config={"format": {"type": "json_schema", "schema": CITY}, "effort": "high"})
    form = llm.calls[0].params.structured_outputs
    assert form is not None
    assert json.loads(form.json or "") == CITY
    assert llm.rendered[0]["template_kwargs"]["reasoning_effort"] == "high"


CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "Who are you?"}]},
    {"role": "user", "content": "Tell me."},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}]},
            {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
            {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


async def test_a_conversation_as_the_template_gets_it() -> None:
    llm = FakeLLM()
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    await Client(llm).post(PATH, request() | {"messages": CONVERSATION, "system": system})
    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert llm.rendered[0]["messages"] == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Hi\nWho are you?\nTell me."},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "t1", "type": "function", "function": call}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "t1", "name": "get_weather"},
        {"role": "tool", "content": "Error: no such city", "tool_call_id": "t2"},
        {"role": "user", "content": "So?"},
    ]
    assert llm.rendered[0]["add_generation_prompt"]


async def test_the_order_of_texts_and_results_is_kept() -> None:
    llm = FakeLLM()
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "Rain"}
    await ask(llm, [{"type": "text", "text": "Before"}, result, {"type": "text", "text": "After"}])
    told = [(message["role"], message["content"]) for message in llm.rendered[0]["messages"]]
    assert told == [("user", "Before"), ("tool", "Rain"), ("user", "After")]


async def test_an_answer_goes_on_with_what_the_assistant_began() -> None:
    llm = FakeLLM()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    await Client(llm).post(PATH, request() | {"messages": messages})
    assert llm.rendered[0]["continue_final_message"]
    assert not llm.rendered[0]["add_generation_prompt"]
    called = [*messages[:1], CONVERSATION[2]]
    await Client(llm).post(PATH, request() | {"messages": called})
    assert llm.rendered[1]["add_generation_prompt"]


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": True, "a": 1}}, {"enable_thinking": True, "a": 1}),
    ],
)
async def test_thinking_is_off_unless_asked_for(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    llm = FakeLLM()
    assert (await ask(llm, **fields)).status == 200
    assert llm.rendered[0]["template_kwargs"] == kwargs


async def test_a_budget_of_thinking_needs_a_model_that_is_known_to_think() -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    llm = FakeLLM()
    await ask(llm, thinking=thinking)
    llm.tokenizer.chat_template = "...<think>...</think>"
    await ask(llm, thinking=thinking)
    assert [call.params.thinking_token_budget for call in llm.calls] == [None, 5]


async def test_whether_to_think_may_be_the_servers_default() -> None:
    llm = FakeLLM()
    args = ServerArgs(default_chat_template_kwargs={"enable_thinking": True})
    await Client(llm, args).post(PATH, request())
    assert llm.rendered[0]["template_kwargs"] == {"enable_thinking": True}


# Counting


async def test_tokens_are_counted_and_nothing_runs() -> None:
    llm = FakeLLM()
    body = {key: value for key, value in request().items() if key != "max_tokens"}
    reply = await Client(llm).post(COUNT, {**body, "system": "Be very brief."})
    assert reply.json == {"input_tokens": len(["system:", "Be", "very", "brief.", "user:", "Hi", "there"])}
    assert not llm.calls


async def test_what_is_too_long_can_be_counted() -> None:
    reply = await Client(FakeLLM()).post(COUNT, request("so " * 3000))
    assert reply.json["input_tokens"] == 3001


# Errors


def error_of(reply: helpers_api.Reply) -> tuple[int, str]:
    assert reply.json["type"] == "error"
    assert reply.json["request_id"] == reply.headers["request-id"]
    return reply.status, reply.json["error"]["type"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"max_tokens": None}, "max_tokens must be an integer, got None"),
        ({"temperature": -1}, "temperature must be a number from 0 to 2"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be one of 'user'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [FILES, FILES]}, "tools[1].name must differ"),
        ({"tools": [FILES], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name must be"),
        ({"tools": [FILES], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice demands a call"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers must be null or empty"),
        ({"container": "c"}, "container must be null"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize must not be given"),
    ],
)
async def test_a_wrong_field_is_named(fields: dict[str, Any], words: str) -> None:
    reply = await ask(FakeLLM(), **fields)
    assert error_of(reply) == (400, "invalid_request_error")
    assert words in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "image", "source": {"type": "base64"}}, "content[0].type must be one of 'text'"),
        ({"type": "document", "source": {}}, "content[0].type must be one of 'text'"),
        ({"type": "text"}, "content[0].text"),
        ({"type": "tool_use", "id": "1", "name": "a", "input": {}}, "content[0].type"),
        (
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]},
            "content[0].content[0].type must be one of 'text'",
        ),
    ],
)
async def test_a_wrong_block_is_named(block: dict[str, Any], words: str) -> None:
    reply = await ask(FakeLLM(), [block])
    assert error_of(reply) == (400, "invalid_request_error")
    assert words in reply.json["error"]["message"]


async def test_all_that_is_wrong_is_said_at_once() -> None:
    reply = await ask(FakeLLM(), [{"type": "image"}], temperature=-1, top_p=2)
    assert all(word in reply.json["error"]["message"] for word in ("content[0].type", "temperature", "top_p"))


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for() -> None:
    reply = await ask(FakeLLM(), "so " * 100)
    assert error_of(reply) == (400, "invalid_request_error")
    assert reply.json["error"]["message"].startswith("prompt is too long")


async def test_errors_of_the_engines_name_anthropics_fields() -> None:
    llm = FakeLLM(Answer(error=helpers_api.InvalidRequestError("stop must be short.", parameter="stop")))
    reply = await ask(llm, stop_sequences=["x"])
    assert reply.json["error"]["message"] == "stop_sequences must be short."


async def test_what_comes_before_the_handler_is_told_in_the_same_way() -> None:
    llm = FakeLLM()
    client = Client(llm, ServerArgs(api_key=("k",), max_body_size=1000))
    assert error_of(await client.post(PATH, request())) == (401, "authentication_error")
    assert error_of(await client.post(PATH, request("x" * 1000), x_api_key="k")) == (413, "request_too_large")
    assert error_of(await client.post(PATH, request(model="x"), x_api_key="k")) == (404, "not_found_error")
    assert error_of(await client.get(PATH, x_api_key="k")) == (405, "invalid_request_error")
    assert error_of(await client.get(f"{PATH}/batches", x_api_key="k")) == (404, "not_found_error")
    llm.no_room = OverloadedError("Too many wait.", retry_after=7)
    overloaded = await client.post(PATH, request(), x_api_key="k")
    assert error_of(overloaded) == (503, "overloaded_error")
    assert overloaded.headers["retry-after"] == "7"


async def test_too_many_requests() -> None:
    client = Client(FakeLLM(), ServerArgs(max_requests_per_minute_per_key=1))
    assert (await client.post(PATH, request())).status == 200
    assert error_of(await client.post(PATH, request())) == (429, "rate_limit_error")


async def test_other_paths_keep_openais_errors() -> None:
    reply = await Client(FakeLLM()).post("/v1/messagesandmore", request())
    assert reply.json["error"]["code"] == "unknown_url"


async def test_an_error_in_a_stream_is_an_event_and_the_end() -> None:
    llm = FakeLLM(Answer(error=RuntimeError("secret")))
    reply = await ask(llm, stream=True)
    assert reply.status == 200
    name, event = events_of(reply.body)[-1]
    assert (name, event["error"]) == ("error", {"type": "api_error", "message": "Internal server error"})
    assert event["request_id"] == reply.headers["request-id"]


# Keys


async def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    client = Client(FakeLLM(), ServerArgs(api_key=("k",)))
    assert (await client.post(PATH, request(), x_api_key="k")).status == 200
    assert (await client.get("/v1/models", x_api_key="k")).status == 200
    assert (await client.get("/v1/models", x_api_key="wrong")).status == 401
    assert (await client.get("/v1/models", authorization="Bearer wrong", x_api_key="k")).status == 401
    assert (await client.get("/v1/models", authorization="Basic x", x_api_key="k")).status == 200
