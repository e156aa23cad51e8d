"""POST /v1/chat/completions: replies, streams, what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Answer, Call, Client, FakeLLM, Reply
from trioserve.config import GenerationDefaults
from trioserve.errors import EngineDeadError, EngineGenerateError
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi there"}]
PROMPT_TOKENS = 6  # one per word of what the fake renders


async def ask(llm: FakeLLM, **request: Any) -> Reply:
    return await Client(llm).post(PATH, {"messages": MESSAGES} | request)


async def stream(llm: FakeLLM, **request: Any) -> list[Any]:
    reply = await ask(llm, stream=True, **request)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return reply.events


def texts(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == index
    )


def two_answers(call: Call, index: int) -> Answer:
    return [Answer(token_ids=(0, 1, 2, 3)), Answer(token_ids=(4, 5), reason=FinishReason.LENGTH)][index]


# Whole replies


async def test_reply() -> None:
    reply = (await ask(FakeLLM(Answer(stop_reason="!")))).json
    (choice,) = reply["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "Hello, world", "refusal": None, "annotations": [],
    }  # fmt: skip
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", "!", None)
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "small"
    assert {"service_tier", "system_fingerprint", "created"} <= reply.keys()
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT_TOKENS, 3)
    assert usage["total_tokens"] == PROMPT_TOKENS + 3
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_n_choices_are_in_order_and_the_prompt_counts_once() -> None:
    reply = (await ask(FakeLLM(two_answers), n=2)).json
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["Hello, world!", " How are"]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "length"]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (PROMPT_TOKENS, 6)


async def test_logprobs() -> None:
    answer = Answer(token_ids=(0, 9, 10), alternatives=((2, -0.25, 1), (3, -2.0, 3)), sampled_rank=2)
    reply = (await ask(FakeLLM(answer), logprobs=True, top_logprobs=2)).json
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    first, second, _ = logprobs["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Hello", -0.5, list(b"Hello"))
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [
        (" world", -0.25),
        ("Hello", -0.5),
    ]
    assert second["bytes"] == [0xC3]  # half a character


async def test_a_sampled_token_that_is_not_likely_is_not_among_the_likely() -> None:
    answer = Answer(token_ids=(0,), alternatives=((2, -0.25, 1), (3, -0.3, 2)), sampled_rank=50)
    reply = (await ask(FakeLLM(answer), logprobs=True, top_logprobs=2)).json
    (position,) = reply["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in position["top_logprobs"]] == [" world", "!"]


async def test_logprobs_without_top() -> None:
    llm = FakeLLM()
    reply = (await ask(llm, logprobs=True)).json
    positions = reply["choices"][0]["logprobs"]["content"]
    assert [position["token"] for position in positions] == ["Hello", ",", " world"]
    assert all(position["top_logprobs"] == [] for position in positions)
    assert llm.calls[0].params.logprobs == 0


async def test_minus_infinity_is_a_number() -> None:
    answer = Answer(token_ids=(0,), alternatives=((2, float("-inf"), 2),))
    reply = (await ask(FakeLLM(answer), logprobs=True, top_logprobs=2)).json
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -9999.0


async def test_token_ids() -> None:
    reply = (await ask(FakeLLM(), return_token_ids=True)).json
    assert reply["prompt_token_ids"] == [7] * PROMPT_TOKENS
    assert reply["choices"][0]["token_ids"] == [0, 1, 2]
    assert "prompt_token_ids" not in (await ask(FakeLLM())).json


# Streams


async def test_stream_sequence() -> None:
    events = await stream(FakeLLM())
    role, *deltas, done = events
    assert role["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert [event["choices"][0]["delta"] for event in deltas] == [
        {"content": "Hello"}, {"content": ","}, {"content": " world"},
    ]  # fmt: skip
    assert [event["choices"][0]["finish_reason"] for event in deltas] == [None, None, "stop"]
    assert done == "[DONE]"
    assert all("usage" not in event for event in events[:-1])
    assert len({(event["id"], event["created"], event["model"]) for event in events[:-1]}) == 1
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}


async def test_stream_of_n_choices() -> None:
    events = await stream(FakeLLM(two_answers), n=2)
    roles = [event["choices"][0] for event in events[:2]]
    assert [(choice["index"], choice["delta"]["role"]) for choice in roles] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    assert (texts(events, 0), texts(events, 1)) == ("Hello, world!", " How are")
    finishes = [
        (choice["index"], choice["finish_reason"])
        for event in events[:-1]
        for choice in event["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(finishes) == [(0, "stop"), (1, "length")]


async def test_stream_with_usage() -> None:
    events = await stream(FakeLLM(two_answers), n=2, stream_options={"include_usage": True})
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert usage["choices"] == []
    whole = (await ask(FakeLLM(two_answers), n=2)).json["usage"]
    assert usage["usage"] == whole


async def test_stream_with_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(FakeLLM(), stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [0, 1, 2, 3, 3]
    assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {PROMPT_TOKENS}


async def test_continuous_usage_alone_does_nothing() -> None:
    events = await stream(FakeLLM(), stream_options={"continuous_usage_stats": True})
    assert all("usage" not in event for event in events[:-1])


async def test_text_that_is_held_back_makes_no_empty_chunk() -> None:
    events = await stream(FakeLLM(Answer(token_ids=(8, 9, 10, 3), hidden=(0,))))
    deltas = [event["choices"][0]["delta"].get("content") for event in events[1:-1]]
    assert deltas == ["café", "!"]


async def test_a_stream_that_ends_without_text() -> None:
    events = await stream(FakeLLM(Answer(token_ids=(0, 11), stop_reason=11)))
    last = events[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", 11)


async def test_streamed_logprobs_are_those_of_the_whole_reply() -> None:
    answer = Answer(token_ids=(8, 9, 10, 3), alternatives=((2, -1.5, 2),), hidden=(0,))
    request = {"logprobs": True, "top_logprobs": 2}
    whole = (await ask(FakeLLM(answer), **request)).json["choices"][0]["logprobs"]["content"]
    events = await stream(FakeLLM(answer), **request)
    streamed = [
        position
        for event in events[:-1]
        if (logprobs := event["choices"][0]["logprobs"]) is not None
        for position in logprobs["content"]
    ]
    assert streamed == whole
    assert len(streamed) == 4


async def test_streamed_token_ids() -> None:
    first, *others, _ = await stream(FakeLLM(), return_token_ids=True)
    assert first["prompt_token_ids"] == [7] * PROMPT_TOKENS
    assert all("prompt_token_ids" not in event for event in others)
    assert [event["choices"][0]["token_ids"] for event in others] == [[0], [1], [2]]


# Failures


@pytest.mark.parametrize("error", [EngineDeadError("gone"), EngineGenerateError("bad step")])
async def test_engine_failure(error: Exception) -> None:
    reply = await ask(FakeLLM(Answer(error=error)))
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert "bad step" not in reply.error["message"]


async def test_engine_failure_in_a_stream() -> None:
    events = await stream(FakeLLM(Answer(error=EngineDeadError("gone"))))
    assert texts(events[:-1]) == "Hello, world"
    assert events[-2]["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"


async def test_an_unforeseen_error_is_hidden_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    reply = await ask(FakeLLM(Answer(error=KeyError("secret"))))
    assert reply.status == 500
    assert reply.error["message"] == "Internal server error"
    assert "secret" not in reply.body.decode()
    assert "secret" in caplog.text


async def test_an_unforeseen_error_in_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    events = await stream(FakeLLM(Answer(error=KeyError("secret"))))
    assert events[-2]["error"]["message"] == "Internal server error"
    assert "secret" in caplog.text


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ABORT, 503), (FinishReason.ERROR, 500)])
async def test_an_answer_that_was_cut_short_does_not_look_whole(reason: FinishReason, status: int) -> None:
    assert (await ask(FakeLLM(Answer(reason=reason)))).status == status
    events = await stream(FakeLLM(Answer(reason=reason)))
    assert events[-2]["error"]["type"] == "server_error"


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_a_stream_that_fails_at_once_is_a_status(reason: FinishReason) -> None:
    reply = await ask(FakeLLM(Answer(token_ids=(0,), reason=reason)), stream=True)
    assert reply.status >= 500


# What reaches the engine


async def test_sampling_fields_reach_the_engine() -> None:
    llm = FakeLLM()
    given = {
        "n": 2, "seed": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 10, "min_p": 0.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
        "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    request = given | {"stop": "END", "stop_token_ids": [3], "logit_bias": {"4": 200}, "cache_salt": "s"}
    await ask(llm, **request, priority=-3, max_tokens=9)
    (call,) = llm.calls
    assert {name: getattr(call.params, name) for name in given} == given
    assert (call.params.stop, call.params.stop_token_ids) == (("END",), (3,))
    assert call.params.logit_bias == {4: 100.0}  # clamped to OpenAI's range
    assert (call.params.max_tokens, call.cache_salt, call.priority) == (9, "s", -3)
    assert call.params.output_kind is RequestOutputKind.FINAL_ONLY


async def test_defaults_are_the_models_and_then_ours() -> None:
    llm = FakeLLM(generation=GenerationDefaults(temperature=0.3, top_k=40, max_new_tokens=20))
    await ask(llm, top_k=5)
    params = llm.calls[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.3, 5, 1.0)
    assert params.max_tokens is None  # the engine knows the model's own limit


async def test_without_a_limit_the_answer_may_fill_the_window() -> None:
    llm = FakeLLM()
    await ask(llm)
    assert llm.calls[0].params.max_tokens is None


async def test_max_completion_tokens_wins() -> None:
    llm = FakeLLM()
    await ask(llm, max_tokens=5, max_completion_tokens=7)
    assert llm.calls[0].params.max_tokens == 7


async def test_streams_ask_for_deltas() -> None:
    llm = FakeLLM()
    await stream(llm)
    assert llm.calls[0].params.output_kind is RequestOutputKind.DELTA


async def test_messages_reach_the_template() -> None:
    llm = FakeLLM()
    messages = [
        {"role": "pirate", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1", "something": "else"},
    ]
    await ask(llm, messages=messages)
    assert llm.rendered[0]["messages"] == [
        {"role": "pirate", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (False, True)),
    ],
)
async def test_generation_prompt(request_fields: dict[str, Any], expected: tuple[bool, bool]) -> None:
    llm = FakeLLM()
    await ask(llm, **request_fields)
    (rendered,) = llm.rendered
    assert (rendered["add_generation_prompt"], rendered["continue_final_message"]) == expected


async def test_template_arguments() -> None:
    llm = FakeLLM()
    tools = [{"type": "function", "function": {"name": "f"}}]
    arguments = {"enable_thinking": True, "x": 1}
    await ask(llm, tools=tools, tool_choice="none", reasoning_effort="none", chat_template_kwargs=arguments)
    (rendered,) = llm.rendered
    assert rendered["tools"] == tools
    assert rendered["template_kwargs"] == {"reasoning_effort": "none", "enable_thinking": True, "x": 1}
