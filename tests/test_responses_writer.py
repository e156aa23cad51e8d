"""What a response is made of, part by part: thoughts, words and calls in one answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from helpers_api import FakeTokenizer
from helpers_responses import Event, names, read_events
from trioserve.outputs import CompletionOutput, FinishReason, RequestOutput
from trioserve.parsers.parts import CallPart, Part, ReasoningPart, TextPart
from trioserve.sampling_params import SamplingParams
from trioserve.server.errors import shutting_down
from trioserve.server.framing import ReplyHead
from trioserve.server.protocol.responses_reader import RESPONSES_READER
from trioserve.server.responses.new_response import new_response
from trioserve.server.responses.writer import ResponseWriter
from trioserve.server.turns import AnswerReader

if TYPE_CHECKING:
    from collections.abc import Sequence

from openai_schemas import check_schema
from test_api_responses import accumulate

THOUGHTS, WORDS = ReasoningPart("Hm, "), TextPart("I look.")
CALLS = [CallPart(0, "f", ""), CallPart(0, None, '{"a":'), CallPart(0, None, " 1}"), CallPart(1, "g", ""),
         CallPart(1, None, "{}")]  # fmt: skip


@attrs.define
class Script:
    """A parser that says what it is told: one list of parts for each piece of text."""

    said: list[list[Part]]
    has_called: bool = False
    is_reasoning: bool = False

    def feed(self, text: str) -> Sequence[Part]:
        return self.said.pop(0) if text else ()

    def finish(self) -> Sequence[Part]:
        return ()


def writer(*said: list[Part]) -> ResponseWriter:
    script = Script(
        list(said), has_called=any(isinstance(part, CallPart) for parts in said for part in parts)
    )
    request = RESPONSES_READER.read(b'{"input": "Hi"}')
    head = ReplyHead(id="", created=0, model="m", system_fingerprint="")
    response = new_response(request, "resp_" + 48 * "0", head, SamplingParams(), is_stored=True)
    return ResponseWriter(response, AnswerReader(script), FakeTokenizer(), None)  # type: ignore[arg-type]


def output(text: str = "x", reason: FinishReason | None = None) -> RequestOutput:
    completion = CompletionOutput(index=0, text=text, token_ids=[1], finish_reason=reason)
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1, 2],
        outputs=[completion],
        finished=reason is not None,
    )


def run(*said: list[Part], reason: FinishReason = FinishReason.STOP) -> tuple[dict[str, Any], list[Event]]:
    """The response and its events."""
    made = writer(*said)
    frames = [made.write(0, output()) for _ in said]
    frames += [made.write(0, output("", reason)), made.end()]
    events = read_events(b"".join(frames))
    for event in events:
        check_schema("ResponseStreamEvent", event.data)
    return events[-1].data["response"], events


def test_thoughts_words_and_calls() -> None:
    response, events = run([THOUGHTS], [ReasoningPart("so"), WORDS], CALLS[:2], CALLS[2:])
    assert names(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, so"}]
    assert (reasoning["summary"], reasoning["encrypted_content"]) == ([], None)
    assert message["content"][0]["text"] == "I look."
    assert (first["name"], first["arguments"]) == ("f", '{"a": 1}')
    assert (second["name"], second["arguments"]) == ("g", "{}")
    assert first["call_id"] != second["call_id"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert accumulate(events) == response["output"]


def test_however_it_is_split_the_output_is_the_same() -> None:
    parts = [THOUGHTS, WORDS, *CALLS]

    def told(response: dict[str, Any]) -> str:
        return json.dumps([{**item, "call_id": None} for item in response["output"]])

    whole, _ = run(parts)
    for place in range(1, len(parts)):
        split, events = run(parts[:place], parts[place:])
        assert told(split) == told(whole)
        assert accumulate(events) == split["output"]
    single, _ = run(*([part] for part in parts))
    assert told(single) == told(whole)


def test_only_the_last_item_is_cut_off() -> None:
    response, events = run([THOUGHTS, WORDS, CALLS[0], CALLS[1]], reason=FinishReason.LENGTH)
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["output"][-1]["arguments"] == '{"a":'
    assert names(events)[-1] == "incomplete"


def test_thoughts_alone() -> None:
    response, _ = run([THOUGHTS], reason=FinishReason.LENGTH)
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
def test_what_was_broken_off_has_one_end(ending: str) -> None:
    made = writer([THOUGHTS], [WORDS])
    made.announce()
    made.advance(output())
    assert made.response.output[0].content[0].text == "Hm, "  # type: ignore[union-attr]
    end = made.break_off if ending == "failed" else lambda _: made.cancel()
    assert len(end(shutting_down().failure)) == 1
    assert (made.response.status, made.response.output[0].status) == (ending, "incomplete")
    assert made.response.usage is not None
    assert made.break_off(shutting_down().failure) == made.cancel() == []


def test_the_next_turn_gets_what_was_said() -> None:
    """Of a call that was cut off, there is nothing to say again."""
    from trioserve.server.responses.context import _items_of
    from trioserve.server.responses.conversation import chat_messages
    from trioserve.server.responses.store import StoredResponse

    response, _ = run([THOUGHTS, WORDS, *CALLS[:4]], reason=FinishReason.LENGTH)
    text = json.dumps(response).encode()
    items = _items_of(StoredResponse(id="", owner="", previous_id=None, response=text, items=b"[]"))
    (message,) = chat_messages(items)
    assert message.text() == "I look."
    assert message.reasoning_content == "Hm, "
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"a": 1}']
