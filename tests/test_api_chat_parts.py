"""Chat completions of models that think, talk and call: how the parts of an answer are written."""

from __future__ import annotations

from typing import Any

import pytest

import helpers_api
from helpers_api import VOCABULARY, Answer, Client, FakeLLM, Reply
from scripted_reader import ScriptedReader
from trioserve.outputs import FinishReason

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
FUNCTIONS = [{"name": "f"}, {"name": "g", "parameters": {"type": "object", "properties": {}}}]
THOUGHTFUL = ["think hm", "think  so", "say Hi", "say !"]
CALLING = ["think hm", "say Wait.", "call f", 'with {"a"', "with : 1}", "call g", "with {}"]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.server.turns.AnswerReader", ScriptedReader)


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Speaker:
    return Speaker(monkeypatch)


class Speaker:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._vocabulary = [*VOCABULARY]
        monkeypatch.setattr(helpers_api, "VOCABULARY", self._vocabulary)

    def say(self, lines: list[str], reason: FinishReason = FinishReason.STOP) -> FakeLLM:
        first = len(self._vocabulary)
        self._vocabulary += [line.encode() + b"\n" for line in lines]
        return FakeLLM(Answer(token_ids=tuple(range(first, len(self._vocabulary))), reason=reason))


async def ask(llm: FakeLLM, **request: Any) -> Reply:
    messages = [{"role": "user", "content": "Hi"}]
    reply = await Client(llm).post(PATH, {"messages": messages, "max_tokens": 50} | request)
    assert reply.status == 200, reply.error
    return reply


async def stream(llm: FakeLLM, **request: Any) -> list[Any]:
    reply = await ask(llm, stream=True, **request)
    return [choice for event in reply.events[:-1] for choice in event["choices"]]


# Reasoning


async def test_reasoning_has_two_names(speaker: Speaker) -> None:
    """vLLM's older one, which most clients read, and its newer one."""
    (choice,) = (await ask(speaker.say(THOUGHTFUL))).json["choices"]
    message = choice["message"]
    assert message["content"] == "Hi!"
    assert message["reasoning"] == message["reasoning_content"] == "hm so"
    role, *deltas = [choice["delta"] for choice in await stream(speaker.say(THOUGHTFUL))]
    assert role == {"role": "assistant", "content": "", "refusal": None}
    assert deltas == [
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"reasoning": " so", "reasoning_content": " so"},
        {"content": "Hi"},
        {"content": "!"},
    ]


async def test_an_answer_without_reasoning_has_no_such_keys(speaker: Speaker) -> None:
    (choice,) = (await ask(speaker.say(["say Hi"]))).json["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal", "annotations"}


async def test_reasoning_can_be_left_out(speaker: Speaker) -> None:
    llm = speaker.say(THOUGHTFUL)
    reply = (await ask(llm, include_reasoning=False)).json
    assert reply["choices"][0]["message"]["content"] == "Hi!"
    assert "reasoning" not in reply["choices"][0]["message"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    choices = await stream(llm, include_reasoning=False)
    assert [choice["delta"].get("content") for choice in choices] == ["", "Hi", "!"]
    assert choices[-1]["finish_reason"] == "stop"


async def test_reasoning_that_is_left_out_keeps_its_logprobs(speaker: Speaker) -> None:
    choices = await stream(speaker.say(THOUGHTFUL), include_reasoning=False, logprobs=True)
    rows = [row for choice in choices for row in (choice["logprobs"] or {}).get("content", ())]
    assert [row["token"] for row in rows] == [f"{line}\n" for line in THOUGHTFUL]


async def test_an_answer_that_never_got_to_the_point(speaker: Speaker) -> None:
    llm = speaker.say(["think hm"], FinishReason.LENGTH)
    (choice,) = (await ask(llm)).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    choices = await stream(llm, include_reasoning=False)
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "length")


async def test_reasoning_tokens_are_counted(speaker: Speaker) -> None:
    llm = speaker.say(THOUGHTFUL)
    usage = (await ask(llm, n=2)).json["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await ask(llm, n=2, stream=True, stream_options=options)).events[:-1]
    assert events[-1]["usage"] == usage
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == 0


# Calls beside words


async def test_calls_beside_words(speaker: Speaker) -> None:
    (choice,) = (await ask(speaker.say(CALLING), tools=TOOLS, tool_choice="none")).json["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("Wait.", "hm")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"


async def test_calls_without_words_have_a_null_content(speaker: Speaker) -> None:
    (choice,) = (await ask(speaker.say(["call f", "with {}"]))).json["choices"]
    assert choice["message"]["content"] is None


async def test_the_end_of_calls_is_a_chunk_of_its_own(speaker: Speaker) -> None:
    choices = await stream(speaker.say(CALLING))
    *others, last = choices
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert all(choice["finish_reason"] is None for choice in others)
    kinds = [sorted(choice["delta"]) for choice in others[1:]]
    assert kinds == [["reasoning", "reasoning_content"], ["content"], *[["tool_calls"]] * 5]


# Functions, as they were before tools


@pytest.mark.parametrize("choice", ["none", {"name": "g"}])
async def test_functions_are_tools(speaker: Speaker, choice: Any) -> None:
    llm = speaker.say(["say Hi"])
    await ask(llm, functions=FUNCTIONS, function_call=choice)
    (rendered,) = llm.rendered
    assert rendered["tools"] == [{"type": "function", "function": function} for function in FUNCTIONS]
    form = llm.calls[0].params.structured_outputs
    assert (form is None) == (choice == "none")


async def test_a_function_call(speaker: Speaker) -> None:
    request = {"functions": FUNCTIONS, "function_call": {"name": "f"}}
    llm = speaker.say(["call f", 'with {"a"', "with : 1}"])
    (choice,) = (await ask(llm, **request)).json["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["message"]["content"] is None
    assert "tool_calls" not in choice["message"]
    choices = await stream(llm, **request)
    assert [choice["delta"] for choice in choices[1:]] == [
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": '{"a"'}},
        {"function_call": {"arguments": ": 1}"}},
        {},
    ]
    assert choices[-1]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "h"}}, "function_call.name"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": [FUNCTIONS[0]] * 2, "function_call": "none"}, "functions[1].name"),
        ({"functions": [FUNCTIONS[0]] * 1025}, "functions"),
        (
            {"functions": FUNCTIONS, "function_call": {"name": "f"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (
            {
                "functions": [{"name": "f", "parameters": {"description": "x" * 2**20}}],
                "function_call": {"name": "f"},
            },
            "functions",
        ),
    ],
)
async def test_functions_that_make_no_sense(fields: dict[str, Any], param: str) -> None:
    llm = FakeLLM()
    reply = await Client(llm).post(PATH, {"messages": [{"role": "user", "content": "Hi"}], **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert param in reply.error["message"]
    assert not llm.calls
