"""Sampling parameters over HTTP: each field reaches the engine, and what it asks for comes back."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Answer, Client, FakeLLM, Reply
from trioserve.errors import InvalidRequestError
from trioserve.outputs import REPETITION_DETECTED, FinishReason
from trioserve.sampling_params import RepetitionDetection

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


async def ask(llm: FakeLLM, path: str, **request: Any) -> Reply:
    prompt = {"prompt": "Hi there"} if path == TEXT else {"messages": [{"role": "user", "content": "Hi"}]}
    return await Client(llm).post(path, prompt | request)


@BOTH
@pytest.mark.parametrize(
    ("request_fields", "name", "expected"),
    [
        ({"allowed_token_ids": [3, 4.0]}, "allowed_token_ids", (3, 4)),
        ({"bad_words": ["foo", " bar"]}, "bad_words", ("foo", " bar")),
        ({"bad_words": []}, "bad_words", ()),
        ({"logit_bias": {"3": -100}}, "logit_bias", {3: -100.0}),
        ({"min_tokens": 2}, "min_tokens", 2),
        ({"prompt_logprobs": 3}, "prompt_logprobs", 3),
        ({"prompt_logprobs": -1}, "prompt_logprobs", -1),
        ({"thinking_token_budget": 0}, "thinking_token_budget", 0),
        ({"thinking_token_budget": -1}, "thinking_token_budget", None),
        (
            {"repetition_detection": {"max_pattern_size": 9, "min_pattern_size": 2, "min_count": 3}},
            "repetition_detection",
            RepetitionDetection(max_pattern_size=9, min_pattern_size=2, min_count=3),
        ),
        ({"vllm_xargs": {"strength": 0.5, "words": ["a"]}}, "extra_args", {"strength": 0.5, "words": ["a"]}),
        ({"extra_args": {"strength": 2}}, "extra_args", {"strength": 2}),
        ({"vllm_xargs": {"a": 1}, "extra_args": {"b": 2}}, "extra_args", {"a": 1, "b": 2}),
        ({"vllm_xargs": {}}, "extra_args", None),
        ({"length_penalty": 0.5}, "repetition_penalty", 1.0),  # of a beam search only
    ],
)
async def test_a_field_reaches_the_engine(
    path: str, request_fields: dict[str, Any], name: str, expected: Any
) -> None:
    llm = FakeLLM()
    assert (await ask(llm, path, **request_fields)).status == 200
    assert getattr(llm.calls[0].params, name) == expected


async def test_all_logprobs() -> None:
    """-1: of the whole vocabulary, however many the engine gives."""
    answer = Answer(token_ids=(0,), alternatives=((2, -0.7, 2), (3, -0.8, 3), (4, -9.0, 12)))
    llm = FakeLLM(answer)
    reply = (await ask(llm, CHAT, logprobs=True, top_logprobs=-1)).json
    (position,) = reply["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in position["top_logprobs"]] == ["Hello", " world", "!", " How"]
    assert llm.calls[0].params.logprobs == -1


async def test_more_logprobs_than_the_engine_gives_name_the_field_that_asked_for_them() -> None:
    reply = await ask(FakeLLM(), CHAT, logprobs=True, top_logprobs=21)
    assert reply.error["param"] == "top_logprobs"
    assert reply.error["message"] == "top_logprobs must be at most 20, got 21."
    reply = await ask(FakeLLM(), TEXT, logprobs=21, echo=True)
    assert reply.error["message"] == "logprobs must be at most 20, got 21."
    reply = await ask(FakeLLM(), TEXT, logprobs=1, prompt_logprobs=21, echo=True)
    assert reply.error["param"] == "prompt_logprobs"


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_repeats_itself(path: str, stream: bool) -> None:
    answer = Answer(reason=FinishReason.REPETITION, stop_reason=REPETITION_DETECTED)
    request = {"repetition_detection": {"max_pattern_size": 4}, "stream": stream}
    reply = await ask(FakeLLM(answer), path, **request)
    (choice,) = reply.events[-2]["choices"] if stream else reply.json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passed_before_the_first_token_is_a_timeout(path: str, stream: bool) -> None:
    answer = Answer(token_ids=(0,), reason=FinishReason.DEADLINE)
    reply = await ask(FakeLLM(answer), path, stream=stream)
    assert reply.status == 504
    assert (reply.error["type"], reply.error["code"]) == ("timeout_error", "deadline_exceeded")


@BOTH
async def test_a_deadline_that_passes_in_a_stream_is_an_error_event(path: str) -> None:
    reply = await ask(FakeLLM(Answer(reason=FinishReason.DEADLINE)), path, stream=True)
    assert reply.status == 200
    assert reply.events[-2]["error"]["code"] == "deadline_exceeded"


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_core_refuses_is_a_400(path: str, stream: bool) -> None:
    """Also in a stream: the headers wait for the first output."""
    error = InvalidRequestError("bad_words must be shorter.", parameter="bad_words")
    reply = await ask(FakeLLM(Answer(token_ids=(), error=error)), path, stream=stream)
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert (reply.error["param"], reply.error["message"]) == ("bad_words", "bad_words must be shorter.")


# Logprobs of the prompt

ENTRY = {"logprob": -0.5, "rank": 1, "decoded_token": "?"}


async def test_prompt_logprobs_of_chat_are_at_the_top() -> None:
    answer = Answer(alternatives=((2, float("-inf"), 2),))
    reply = (await ask(FakeLLM(answer), CHAT, prompt_logprobs=1)).json
    other = {"logprob": -9999.0, "rank": 2, "decoded_token": " world"}  # JSON has no infinity
    assert reply["prompt_logprobs"] == [None, {"7": ENTRY, "2": other}]  # two words: "user: Hi"
    assert "prompt_logprobs" not in (await ask(FakeLLM(), CHAT)).json


async def test_prompt_logprobs_of_completions_are_in_each_choice() -> None:
    reply = (await ask(FakeLLM(), TEXT, prompt=["a b", "c"], n=2, prompt_logprobs=0)).json
    shown = [choice["prompt_logprobs"] for choice in reply["choices"]]
    assert shown == [[None, {"7": ENTRY}], [None, {"7": ENTRY}], [None], [None]]
    (choice,) = (await ask(FakeLLM(), TEXT)).json["choices"]
    assert "prompt_logprobs" not in choice


# Echo


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_lines_up_prompt_and_output(stream: bool) -> None:
    """What evaluation harnesses do: token ids in, and the logprobs of each but the first."""
    answer = Answer(token_ids=(3,), alternatives=((2, -0.25, 1),), sampled_rank=2, reason=FinishReason.LENGTH)
    llm = FakeLLM(answer)
    request = {"prompt": [8, 9, 10, 4], "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    reply = await ask(llm, TEXT, **request)
    (choice,) = reply.events[0]["choices"] if stream else reply.json["choices"]
    assert choice["text"] == "café How!"
    assert choice["logprobs"]["tokens"] == ["caf", "�", "�", " How", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [
        None,
        {" world": -0.25, "�": -0.5},
        {" world": -0.25, "�": -0.5},
        {" world": -0.25, " How": -0.5},
        {" world": -0.25, "!": -0.5},
    ]
    assert choice["logprobs"]["text_offset"] == [0, 3, 3, 4, 8]
    assert (llm.calls[0].params.logprobs, llm.calls[0].params.prompt_logprobs) == (1, 1)
    assert "prompt_logprobs" not in choice


async def test_a_stream_echoes_the_prompts_logprobs_once() -> None:
    reply = await ask(FakeLLM(), TEXT, prompt=[[4, 5], [6]], echo=True, logprobs=0, stream=True)
    tokens: dict[int, list[str]] = {0: [], 1: []}
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
    output = ["Hello", ",", " world"]
    assert tokens == {0: [" How", " are", *output], 1: [" you", *output]}


async def test_a_token_that_the_prompts_text_does_not_show_shifts_nothing() -> None:
    """The fake's tokenizer makes a `?` of each word; the output starts where the prompt's text ends."""
    reply = (await ask(FakeLLM(), TEXT, prompt="a b", echo=True, logprobs=0)).json
    (choice,) = reply["choices"]
    assert choice["text"] == "a bHello, world"
    assert choice["logprobs"]["text_offset"][2:] == [3, 8, 9]
    reply = (await ask(FakeLLM(), TEXT, prompt="a", echo=True, logprobs=0)).json
    assert reply["choices"][0]["logprobs"]["text_offset"] == [0, 1, 6, 7]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_no_tokens_is_the_prompt(stream: bool) -> None:
    llm = FakeLLM(Answer(token_ids=(11,), stop_reason=11))
    request = {"prompt": [4, 5], "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    reply = await ask(llm, TEXT, stream=stream, **request, **options)
    (choice,) = reply.events[0]["choices"] if stream else reply.json["choices"]
    assert choice["text"] == " How are"
    assert choice["logprobs"]["tokens"] == [" How", " are"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])
    usage = reply.events[-2]["usage"] if stream else reply.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 0)
    assert llm.calls[0].params.max_tokens == 1


async def test_an_echo_of_no_tokens_that_failed_is_no_answer() -> None:
    llm = FakeLLM(Answer(token_ids=(0,), reason=FinishReason.ERROR))
    assert (await ask(llm, TEXT, echo=True, max_tokens=0)).status == 500
