"""POST /v1/completions: replies, streams, lists of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Answer, Call, Client, FakeLLM, Reply
from trioserve.errors import EngineDeadError
from trioserve.frontend.prompts import TextPrompt
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind

PATH = "/v1/completions"


async def ask(llm: FakeLLM, **request: Any) -> Reply:
    return await Client(llm).post(PATH, {"prompt": "Once upon a time"} | request)


async def stream(llm: FakeLLM, **request: Any) -> list[Any]:
    reply = await ask(llm, stream=True, **request)
    assert reply.status == 200
    return reply.events


def choices(events: list[Any], index: int = 0) -> list[Any]:
    return [
        choice for event in events[:-1] for choice in event.get("choices", ()) if choice["index"] == index
    ]


def by_prompt(call: Call, index: int) -> Answer:
    """Answers that tell which prompt and sample they are of: token ids (number of the prompt's, index)."""
    return Answer(token_ids=(len(call.token_ids), index))


# Whole replies


async def test_reply() -> None:
    llm = FakeLLM(Answer(reason=FinishReason.LENGTH))
    reply = (await ask(llm)).json
    assert reply["choices"] == [
        {"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert (reply["object"], reply["model"]) == ("text_completion", "small")
    assert reply["id"].startswith("cmpl-")
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 3, 7)
    (call,) = llm.calls
    assert call.request_id == reply["id"] + "-0"
    assert call.params.output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize(
    ("request_fields", "expected"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3)]
)
async def test_sixteen_tokens_are_the_default(request_fields: dict[str, Any], expected: int) -> None:
    llm = FakeLLM()
    await ask(llm, **request_fields)
    assert llm.calls[0].params.max_tokens == expected


@pytest.mark.parametrize(
    ("prompt", "reached"),
    [
        ("a b", [TextPrompt("a b")]),
        (["a b", "c"], [TextPrompt("a b"), TextPrompt("c")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_forms_of_prompts(prompt: Any, reached: list[Any]) -> None:
    llm = FakeLLM()
    reply = (await ask(llm, prompt=prompt)).json
    assert [call.prompt for call in llm.calls] == reached
    assert [call.request_id for call in llm.calls] == [f"{reply['id']}-{i}" for i in range(len(reached))]


async def test_special_tokens_can_be_left_out() -> None:
    llm = FakeLLM()
    await ask(llm, add_special_tokens=False)
    assert llm.calls[0].prompt == TextPrompt("Once upon a time", add_special_tokens=False)


async def test_choices_of_several_prompts_are_numbered_by_prompt_and_sample() -> None:
    reply = (await ask(FakeLLM(by_prompt), prompt=["a b c", "a"], n=2)).json
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == ["!Hello", "!,", ",Hello", ",,"]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 + 1, 2 * 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


async def test_logprobs() -> None:
    answer = Answer(token_ids=(0, 1), alternatives=((2, -0.25, 1), (3, -2.0, 3)), sampled_rank=2)
    reply = (await ask(FakeLLM(answer), logprobs=1)).json
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["Hello", ","],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{" world": -0.25, "Hello": -0.5}, {" world": -0.25, ",": -0.5}],
        "text_offset": [0, 5],
    }


async def test_logprobs_0_reports_the_sampled_tokens() -> None:
    reply = (await ask(FakeLLM(), logprobs=0)).json
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"Hello": -0.5}, {",": -0.5}, {" world": -0.5}]


@pytest.mark.parametrize("streamed", [False, True])
async def test_text_offsets_point_into_the_text(streamed: bool) -> None:
    """A character of two tokens does not shift what comes after it."""
    llm = FakeLLM(Answer(token_ids=(8, 9, 10, 3)))
    if streamed:
        parts = [choice["logprobs"] for choice in choices(await stream(llm, logprobs=0))]
    else:
        parts = [(await ask(llm, logprobs=0)).json["choices"][0]["logprobs"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert offsets == [0, 3, 3, 4]
    assert "café!"[offsets[0] : offsets[1]] == "caf"
    assert "café!"[offsets[3] :] == "!"


async def test_echo() -> None:
    reply = (await ask(FakeLLM(), echo=True)).json
    assert reply["choices"][0]["text"] == "Once upon a timeHello, world"


async def test_echo_of_token_ids_is_their_text() -> None:
    reply = (await ask(FakeLLM(), echo=True, prompt=[4, 5, 6])).json
    assert reply["choices"][0]["text"] == " How are youHello, world"


async def test_token_ids() -> None:
    (choice,) = (await ask(FakeLLM(), prompt=[4, 5], return_token_ids=True)).json["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([4, 5], [0, 1, 2])


# Streams


async def test_stream_sequence() -> None:
    *chunks, done = await stream(FakeLLM())
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", ",", " world"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert done == "[DONE]"


async def test_stream_of_several_prompts() -> None:
    request = {"prompt": ["a b c", "a"], "n": 2, "stream_options": {"include_usage": True}}
    *chunks, usage, done = await stream(FakeLLM(by_prompt), **request)
    joined = ["".join(choice["text"] for choice in choices([*chunks, done], index)) for index in range(4)]
    assert joined == ["!Hello", "!,", ",Hello", ",,"]
    for index in range(4):
        assert [choice["finish_reason"] for choice in choices([*chunks, done], index)] == [None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == (await ask(FakeLLM(by_prompt), prompt=["a b c", "a"], n=2)).json["usage"]


async def test_stream_with_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(FakeLLM(), stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 3]


async def test_echo_comes_once_per_choice_of_a_stream() -> None:
    events = await stream(FakeLLM(by_prompt), prompt=["a b c", "a"], echo=True)
    assert [choice["text"] for choice in choices(events, 0)] == ["a b c!", "Hello"]
    assert [choice["text"] for choice in choices(events, 1)] == ["a,", "Hello"]


async def test_streamed_logprobs_are_those_of_the_whole_reply() -> None:
    answer = Answer(token_ids=(8, 9, 10, 3), alternatives=((2, -1.5, 2),), hidden=(0,))
    whole = (await ask(FakeLLM(answer), logprobs=2)).json["choices"][0]["logprobs"]
    parts = [choice["logprobs"] for choice in choices(await stream(FakeLLM(answer), logprobs=2))]
    assert {key: [item for part in parts for item in part[key]] for key in whole} == whole


async def test_streamed_token_ids() -> None:
    events = await stream(FakeLLM(), prompt=[4, 5], return_token_ids=True)
    first, *others = choices(events)
    assert first["prompt_token_ids"] == [4, 5]
    assert all("prompt_token_ids" not in choice for choice in others)
    assert [choice["token_ids"] for choice in (first, *others)] == [[0], [1], [2]]


# Failures


def second_fails(call: Call, index: int) -> Answer:
    return Answer(error=EngineDeadError("gone") if len(call.token_ids) == 1 else None)


async def test_a_prompt_that_fails_fails_the_reply() -> None:
    llm = FakeLLM(second_fails)
    assert (await ask(llm, prompt=["a b c", "a"])).status == 500
    assert not llm.running


async def test_a_prompt_that_fails_fails_the_stream() -> None:
    llm = FakeLLM(second_fails)
    events = await stream(llm, prompt=["a b c", "a"])
    assert events[-2]["error"]["code"] == "engine_dead"
    assert sum("error" in event for event in events[:-1]) == 1
    assert events[-1] == "[DONE]"
    assert not llm.running


async def test_a_wrong_prompt_among_others_is_a_status_and_nothing_runs_on() -> None:
    llm = FakeLLM()
    reply = await ask(llm, prompt=["a b c", ""], stream=True)
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert not llm.running
