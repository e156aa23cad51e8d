"""POST /v1/completions: replies, streams, lists of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from helpers_api import Answer, Call, Client, FakeLLM, Reply
from helpers_complaints import until
from trioserve.errors import EngineDeadError
from trioserve.frontend.prompts import TextPrompt, Truncation
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from fake_engine import FakeEngine

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


# Best of several


def by_likelihood(call: Call, index: int) -> Answer:
    """Four answers of two and three tokens, of which those at the end are the likeliest by token."""
    return Answer(token_ids=(index,) * (2 + index % 2), logprob=index - 4.0)


async def test_the_best_of_several() -> None:
    llm = FakeLLM(by_likelihood)
    reply = (await ask(llm, best_of=4, n=2)).json
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "!!!"),
        (1, " world world"),
    ]
    assert all(choice["logprobs"] is None for choice in reply["choices"])  # nobody asked for them
    assert reply["usage"]["completion_tokens"] == 2 + 3 + 2 + 3  # what was drawn
    assert (llm.calls[0].params.n, llm.calls[0].params.logprobs) == (4, 0)


async def test_the_best_of_several_for_each_prompt() -> None:
    reply = (await ask(FakeLLM(by_likelihood), prompt=["a", "b c"], best_of=3, n=1, logprobs=0)).json
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, " world world"),
        (1, " world world"),
    ]
    assert reply["choices"][1]["logprobs"]["token_logprobs"] == [-2.0, -2.0]


async def test_all_that_are_drawn_take_room() -> None:
    reply = await ask(FakeLLM(), prompt=["Hi"] * 129, best_of=128)
    assert (reply.status, reply.error["param"]) == (400, "n")


# Long prompts


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": 3}, [3, 4, 5]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [3, 4, 5]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 62}, [4, 5]),
    ],
)
async def test_a_prompt_of_token_ids_is_cut(fields: dict[str, Any], expected: list[int]) -> None:
    llm = FakeLLM()
    assert (await ask(llm, prompt=[1, 2, 3, 4, 5], **fields)).status == 200
    assert llm.calls[0].prompt == expected


async def test_a_text_is_cut_by_whoever_tokenizes_it() -> None:
    llm = FakeLLM()
    await ask(llm, truncate_prompt_tokens=-1, truncation_side="right", max_tokens=None)
    assert llm.calls[0].prompt.truncation == Truncation(64 - 16, keeps_end=False)


async def test_a_limit_that_leaves_no_room_is_what_is_wrong(fake: FakeEngine) -> None:
    request = {"prompt": "abc", "max_tokens": 200, "truncate_prompt_tokens": -1}
    reply = await Client(fake.llm).post(PATH, request)  # type: ignore[arg-type]  # a real one
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def ask_really(fake: FakeEngine, output: str, **request: Any) -> Reply:
    """By a real AsyncLLM with a tokenizer of bytes, whose engine answers this to the first request."""

    async def answer() -> None:
        await until(lambda: fake.client.added)
        fake.client.emit(fake.client.added[0], output, FinishReason.LENGTH)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        return await Client(fake.llm).post(PATH, request)  # type: ignore[arg-type]  # not the fake one


@pytest.mark.parametrize(("side", "kept"), [("left", "cdef"), ("right", "abcd")])
async def test_an_echo_shows_what_was_kept_of_a_text(fake: FakeEngine, side: str, kept: str) -> None:
    request = {"prompt": "abcdef", "echo": True, "truncate_prompt_tokens": 4, "truncation_side": side}
    reply = (await ask_really(fake, "xy", **request)).json
    assert reply["choices"][0]["text"] == kept + "xy"
    assert reply["usage"]["prompt_tokens"] == 4


async def test_a_text_of_any_length_can_be_cut(fake: FakeEngine) -> None:
    """Also one that would not be tokenized for its length alone."""
    text = "ab" * 16_384  # characters; the context has 128 tokens
    request = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
    reply = await ask_really(fake, "x", truncate_prompt_tokens=2, **request)
    assert reply.json["choices"][0]["prompt_token_ids"] == list(b"ab")
    reply = await Client(fake.llm).post(PATH, request)  # type: ignore[arg-type]  # as above
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


# Logprobs by other names


async def test_tokens_by_their_ids() -> None:
    answer = Answer(token_ids=(9, 10), alternatives=((2, -0.25, 1),), sampled_rank=2)
    request = {"prompt": [0, 3], "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = (await ask(FakeLLM(answer), **request)).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:0", "token_id:3", "token_id:9", "token_id:10"]
    assert logprobs["top_logprobs"][3] == {"token_id:2": -0.25, "token_id:10": -0.5}
    assert logprobs["text_offset"] == [0, 5, 6, 6]


async def test_logprobs_of_tokens_that_are_named() -> None:
    answer = Answer(token_ids=(0,), alternatives=((2, -0.6, 2), (3, -8.0, 70), (4, -9.0, 80)))
    llm = FakeLLM(answer)
    reply = (await ask(llm, logprobs=1, logprob_token_ids=[4, 0, 7])).json
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{"Hello": -0.5, " How": -9.0}]
    assert llm.calls[0].params.logprob_token_ids == (4, 0, 7)


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
