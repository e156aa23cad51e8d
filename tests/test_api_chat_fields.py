"""Chat completions, the rarer fields: what they make of the answer, and of what reaches the template."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Answer, Client, FakeLLM, Reply
from trioserve.frontend.prompts import Truncation
from trioserve.server_args import ServerArgs

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi there"}]
PREFILLED = [*MESSAGES, {"role": "assistant", "content": "Well:"}]


async def ask(llm: FakeLLM, **request: Any) -> Reply:
    reply = await Client(llm).post(PATH, {"messages": MESSAGES} | request)
    assert reply.status == 200, reply.error
    return reply


def deltas(reply: Reply, index: int = 0) -> list[Any]:
    choices = [choice for event in reply.events[:-1] for choice in event["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


# What the template gets


async def test_what_goes_to_the_template() -> None:
    llm = FakeLLM()
    documents = [{"title": "a", "text": "b"}]
    await ask(llm, documents=documents, verbosity="low", reasoning_effort="xhigh")
    assert llm.rendered[0]["template_kwargs"] == {
        "documents": documents,
        "reasoning_effort": "xhigh",
        "enable_thinking": True,
        "verbosity": "low",
    }


async def test_the_servers_defaults_for_the_template_hold_where_a_request_says_nothing() -> None:
    llm = FakeLLM()
    client = Client(llm, ServerArgs(default_chat_template_kwargs={"enable_thinking": False, "x": 1}))
    for fields in ({}, {"reasoning_effort": "low"}, {"chat_template_kwargs": {"x": 2}}):
        assert (await client.post(PATH, {"messages": MESSAGES, **fields})).status == 200
    plain, thinking, other = [rendered["template_kwargs"] for rendered in llm.rendered]
    assert plain == {"enable_thinking": False, "x": 1}
    assert thinking == {"enable_thinking": True, "x": 1, "reasoning_effort": "low"}
    assert other == {"enable_thinking": False, "x": 2}


@pytest.mark.parametrize(
    ("message", "rendered"),
    [
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"role": "assistant", "content": "a"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        ({"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "no"}),
        (
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
            },
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "hm"},
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
                ],
            },
        ),
        (
            {"role": "function", "name": "f", "content": "42"},
            {"role": "tool", "name": "f", "content": "42"},
        ),
        ({"role": "function", "name": "f", "content": None}, {"role": "tool", "name": "f", "content": ""}),
    ],
)
async def test_forms_of_messages(message: dict[str, Any], rendered: dict[str, Any]) -> None:
    llm = FakeLLM()
    await ask(llm, messages=[*MESSAGES, message])
    assert llm.rendered[0]["messages"][1] == rendered


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "nonsense", 5])
async def test_parts_that_are_no_text_are_refused_by_their_path(kind: Any) -> None:
    part = {"type": kind, "image_url": {"url": "http://127.0.0.1/x.png"}}
    messages = [*MESSAGES, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    reply = await Client(FakeLLM()).post(PATH, {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, "messages[1].content[1].type")
    assert repr(kind) in reply.error["message"]


@pytest.mark.parametrize(("kind", "field"), [("refusal", "refusal"), ("thinking", "thinking")])
async def test_a_part_without_its_text_is_refused(kind: str, field: str) -> None:
    messages = [{"role": "assistant", "content": [{"type": kind, "text": "elsewhere"}]}]
    reply = await Client(FakeLLM()).post(PATH, {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, f"messages[0].content[0].{field}")


async def test_special_tokens_of_the_tokenizer_are_added_on_demand() -> None:
    llm = FakeLLM()
    await ask(llm)
    await ask(llm, add_special_tokens=True)
    assert [call.prompt.add_special_tokens for call in llm.calls] == [False, True]


async def test_a_long_conversation_is_cut() -> None:
    llm = FakeLLM()
    await ask(llm, truncate_prompt_tokens=-1, max_tokens=4)
    await ask(llm, truncate_prompt_tokens=5, truncation_side="right")
    assert [call.prompt.truncation for call in llm.calls] == [
        Truncation(60),
        Truncation(5, keeps_end=False),
    ]


# What the answer has


@pytest.mark.parametrize("fields", [{}, {"continue_final_message": True}])
async def test_echo_brings_the_last_message_of_the_assistants_back(fields: dict[str, Any]) -> None:
    request = {"messages": PREFILLED, "echo": True, **fields}
    (choice,) = (await ask(FakeLLM(), **request)).json["choices"]
    assert choice["message"]["content"] == "Well:Hello, world"
    reply = await ask(FakeLLM(), stream=True, n=2, **request)
    for index in range(2):
        role, *others = deltas(reply, index)
        assert role == {"role": "assistant", "content": "", "refusal": None}
        assert [delta["content"] for delta in others] == ["Well:", "Hello", ",", " world"]


async def test_echo_of_somebody_elses_message_is_nothing() -> None:
    (choice,) = (await ask(FakeLLM(), echo=True)).json["choices"]
    assert choice["message"]["content"] == "Hello, world"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_text(stream: bool) -> None:
    reply = await ask(FakeLLM(), stream=stream, return_prompt_text=True)
    first = reply.events[0] if stream else reply.json
    assert first["prompt_text"] == "user: Hi there"
    if stream:
        assert all("prompt_text" not in event for event in reply.events[1:-1])
    assert "prompt_token_ids" not in first
    both = await ask(FakeLLM(), stream=stream, return_prompt_text=True, return_token_ids=True)
    first = both.events[0] if stream else both.json
    assert (first["prompt_text"], first["prompt_token_ids"]) == ("user: Hi there", [7, 7, 7])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "told"), [(None, None), ("auto", "default"), ("priority", "default")])
async def test_the_service_tier_is_the_only_one_there_is(
    stream: bool, asked: str | None, told: str | None
) -> None:
    reply = await ask(FakeLLM(), stream=stream, service_tier=asked)
    for answer in reply.events[:-1] if stream else [reply.json]:
        assert answer["service_tier"] == told


async def test_metadata_comes_back() -> None:
    assert (await ask(FakeLLM(), metadata={"a": "b"})).json["metadata"] == {"a": "b"}
    assert "metadata" not in (await ask(FakeLLM())).json


@pytest.mark.parametrize("padded", [False, True])
async def test_obfuscation_is_accepted_and_not_done(padded: bool) -> None:
    reply = await ask(FakeLLM(), stream=True, stream_options={"include_obfuscation": padded})
    assert all("obfuscation" not in event and "usage" not in event for event in reply.events[:-1])


async def test_tokens_by_their_ids() -> None:
    answer = Answer(token_ids=(9, 10), alternatives=((2, -0.25, 1),), sampled_rank=2)
    request = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = (await ask(FakeLLM(answer), **request)).json["choices"]
    position, _ = choice["logprobs"]["content"]
    assert (position["token"], position["bytes"]) == ("token_id:9", [0xC3])
    assert position["top_logprobs"] == [{"token": "token_id:2", "logprob": -0.25, "bytes": list(b" world")}]


async def test_logprobs_of_tokens_that_are_named() -> None:
    answer = Answer(token_ids=(0,), alternatives=((2, -0.6, 2), (3, -8.0, 70), (4, -9.0, 80)))
    request = {"logprobs": True, "top_logprobs": 1, "logprob_token_ids": [4, 0, 3]}
    (choice,) = (await ask(FakeLLM(answer), **request)).json["choices"]
    (position,) = choice["logprobs"]["content"]
    assert [top["token"] for top in position["top_logprobs"]] == ["Hello", " How", "!"]
