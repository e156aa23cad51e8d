"""Answers that are parsed, through the API: what is asked of the engine, and what its text becomes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import helpers_api
from helpers_api import VOCABULARY, Answer, Client, FakeLLM, Reply
from helpers_parsers import split
from trioserve.args import EngineArgs
from trioserve.errors import InvalidConfigError, InvalidRequestError
from trioserve.outputs import FinishReason
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Sequence

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
FILES = {"type": "function", "function": {"name": "list_files"}}
TOOLS = [WEATHER, FILES]

HERMES = "<tool_call>"
THINKS = "<think></think>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER_CALL = '\n<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>'


class Model:
    """Says a text, token by token, and has this chat template."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tokens: Sequence[str],
        *,
        template: str,
        special: Sequence[str] = (),
        reason: FinishReason = FinishReason.STOP,
        args: ServerArgs | None = None,
        refused: InvalidRequestError | None = None,
    ) -> None:
        vocabulary = [*VOCABULARY, *(token.encode() for token in tokens)]
        monkeypatch.setattr(helpers_api, "VOCABULARY", vocabulary)
        answer = Answer(
            token_ids=tuple(range(len(VOCABULARY), len(vocabulary))), reason=reason, error=refused
        )
        self.llm = FakeLLM(answer)
        self.llm.tokenizer.chat_template = template
        self.llm.tokenizer.special_tokens = frozenset(special)
        self._client = Client(self.llm, args)

    async def ask(self, content: str = "Hi", **request: Any) -> Reply:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 50} | request
        return await self._client.post("/v1/chat/completions", body)

    async def message(self, content: str = "Hi", **request: Any) -> tuple[dict[str, Any], str, Any]:
        """(message, finish reason, usage), which are the same in a stream."""
        reply = await self.ask(content, **request)
        assert reply.status == 200, reply.error
        (choice,) = reply.json["choices"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await self.ask(content, **request, **options)
        assert streamed_message(streamed) == simple(choice["message"])
        assert streamed.events[-2]["usage"] == reply.json["usage"]
        reasons = [c["finish_reason"] for event in streamed.events[:-2] for c in event["choices"]]
        assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
        return simple(choice["message"]), choice["finish_reason"], reply.json["usage"]

    @property
    def params(self) -> Any:
        return self.llm.calls[-1].params


def simple(message: dict[str, Any]) -> dict[str, Any]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
    }


def streamed_message(reply: Reply) -> dict[str, Any]:
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                if "name" in call["function"]:
                    found["calls"].append((call["function"]["name"], ""))
                name, arguments = found["calls"][call["index"]]
                found["calls"][call["index"]] = (name, arguments + (call["function"]["arguments"] or ""))
    return found


async def test_a_model_that_calls_of_its_own_accord(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, split("I look.\n" + CALL + OTHER_CALL, [*range(0, 130, 4)]), template=HERMES)
    message, reason, _ = await model.message(tools=TOOLS)
    assert message["content"] == "I look."
    assert message["calls"] == [("get_weather", '{"city": "Paris"}'), ("list_files", "{}")]
    assert reason == "tool_calls"
    assert model.params.structured_outputs is None
    assert model.params.skip_special_tokens


async def test_one_call_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, [CALL, OTHER_CALL], template=HERMES)
    message, reason, _ = await model.message(tools=TOOLS, parallel_tool_calls=False)
    assert (message["calls"], reason) == ([("get_weather", '{"city": "Paris"}')], "tool_calls")


async def test_one_call_at_most_is_whole_though_the_next_one_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(monkeypatch, [CALL, OTHER_CALL[:-14]], template=HERMES, reason=FinishReason.LENGTH)
    message, reason, _ = await model.message(tools=TOOLS, parallel_tool_calls=False)
    assert (message["calls"], reason) == ([("get_weather", '{"city": "Paris"}')], "tool_calls")


async def test_a_call_that_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, [CALL[:-20]], template=HERMES, reason=FinishReason.LENGTH)
    message, reason, _ = await model.message(tools=TOOLS)
    assert message["calls"][0][0] == "get_weather"
    assert reason == "length"


async def test_without_tools_nothing_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, [CALL], template=HERMES)
    asks: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for request in asks:
        message, reason, _ = await model.message(**request)
        assert (message["content"], reason) == (CALL, "stop")
    assert model.llm.rendered[-1]["tools"] is not None


async def test_tools_may_be_kept_from_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(exclude_tools_when_tool_choice_none=True)
    model = Model(monkeypatch, ["Hi"], template=HERMES, args=args)
    await model.ask(tools=TOOLS, tool_choice="none")
    await model.ask(tools=TOOLS)
    assert [bool(rendered["tools"]) for rendered in model.llm.rendered] == [False, True]


@pytest.mark.parametrize("args", [None, ServerArgs(tool_call_parser="none")])
async def test_a_model_whose_calls_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, args: ServerArgs | None
) -> None:
    model = Model(monkeypatch, ["Hi"], template="" if args is None else HERMES, args=args)
    reply = await model.ask(tools=TOOLS)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "--tool-call-parser" in reply.error["message"]
    assert (await model.ask(tools=TOOLS, tool_choice="none")).status == 200


async def test_a_parser_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(
        monkeypatch, ["[get_weather(", "city='Rome')]"], template=HERMES,
        args=ServerArgs(tool_call_parser="pythonic"),
    )  # fmt: skip
    message, _, _ = await model.message(tools=TOOLS)
    assert message["calls"] == [("get_weather", '{"city": "Rome"}')]


def test_unknown_parsers() -> None:
    with pytest.raises(InvalidConfigError, match=r"tool_call_parser must be one of auto, none, hermes.*'x'"):
        ServerArgs(tool_call_parser="x")
    with pytest.raises(InvalidConfigError, match=r"reasoning_parser must be one of auto, none, deep.*'x'"):
        EngineArgs(reasoning_parser="x")


async def test_strict_functions_are_held_to_their_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, [CALL], template=HERMES)
    await model.message(tools=[STRICT, FILES])
    form = json.loads(model.params.structured_outputs.structural_tag)["format"]
    assert form["triggers"] == ["<tool_call>"]
    schemas = {tag["begin"]: tag["content"]["json_schema"] for tag in form["tags"]}
    assert schemas == {
        '<tool_call>\n{"name": "get_weather", "arguments": ': CITY,
        '<tool_call>\n{"name": "list_files", "arguments": ': {"type": "object"},
    }


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"tools": [STRICT]}, "tools"),
        ({"tools": [STRICT], "response_format": {"type": "text"}}, "tools"),
        ({"functions": [STRICT["function"]]}, "functions"),
        ({"tools": [STRICT], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [STRICT], "structured_outputs": {"json_object": True}}, "structured_outputs"),
    ],
)
async def test_a_strict_schema_that_the_core_refuses_is_the_tools(
    monkeypatch: pytest.MonkeyPatch, request_fields: dict[str, Any], field: str
) -> None:
    refused = InvalidRequestError("structured_outputs is too large.", parameter="structured_outputs")
    model = Model(monkeypatch, [], template=HERMES, refused=refused)
    reply = await model.ask(**request_fields)
    assert (reply.status, reply.error["param"]) == (400, field)
    assert reply.error["message"] == f"{field} is too large."


async def test_marks_that_are_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["Ok", "<pad>", "[TOOL_CALLS]", "get_weather", '{"city"', ': "Oslo"}', "<pad>"]
    special = ["[TOOL_CALLS]", "<pad>"]
    model = Model(monkeypatch, tokens, template="[TOOL_CALLS]", special=special)
    message, reason, _ = await model.message(tools=TOOLS)
    assert not model.params.skip_special_tokens
    assert message == {"content": "Ok", "reasoning": "", "calls": [("get_weather", '{"city": "Oslo"}')]}
    assert reason == "tool_calls"
    await model.ask()
    assert model.params.skip_special_tokens, "who asks for no calls needs no marks"


# Reasoning


async def test_reasoning_and_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["<th", "ink>\n", "Hm", "m.", "\n</", "think>\n\nHe", "llo", " you"]
    model = Model(monkeypatch, tokens, template=THINKS)
    message, reason, usage = await model.message()
    assert message == {"content": "Hello you", "reasoning": "Hmm.", "calls": []}
    assert reason == "stop"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 6


async def test_no_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, ["Hello", " </think> you"], template=THINKS)
    message, _, usage = await model.message()
    assert message["content"] == "Hello </think> you"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_prompt_that_ends_with_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, ["Hm.", "</think>", "Hello"], template=THINKS)
    message, _, usage = await model.message("... <think>\n")
    assert (message["content"], message["reasoning"]) == ("Hello", "Hm.")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_a_call_behind_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(monkeypatch, [f"{CALL}</think>", OTHER_CALL], template=HERMES + THINKS)
    message, reason, _ = await model.message("<think>", tools=TOOLS)
    assert message == {"content": "", "reasoning": CALL, "calls": [("list_files", "{}")]}
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("end", "free"),
    [("<think>", (None, "</think>")), ("", ("<think>", "</think>")), ("</think>", (None, None))],
)
@pytest.mark.parametrize(
    "request_fields",
    [{"tools": TOOLS, "tool_choice": "required"}, {"response_format": {"type": "json_object"}}],
)
async def test_a_form_begins_behind_the_reasoning(
    monkeypatch: pytest.MonkeyPatch, end: str, free: tuple[str | None, str | None], request_fields: Any
) -> None:
    model = Model(monkeypatch, ["x"], template=THINKS)
    await model.ask("Hi" + end, **request_fields)
    form = model.params.structured_outputs
    assert (form.free_from, form.free_until) == free


async def test_required_calls_behind_the_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '[{"name": "list_files", "arguments": {}}]'
    model = Model(monkeypatch, ["Hm.</thi", "nk>\n\n[", answer[1:]], template=THINKS)
    message, reason, _ = await model.message("<think>", tools=TOOLS, tool_choice="required")
    assert message == {"content": "", "reasoning": "Hm.", "calls": [("list_files", "{}")]}
    assert reason == "tool_calls"
