"""What a reader says, as blocks of a message, whole and streamed: thinking above all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from helpers_anthropic import accumulate, events_of, without_ids
from trioserve.outputs import CompletionOutput, FinishReason, RequestOutput
from trioserve.parsers.parts import CallPart, ReasoningPart, TextPart
from trioserve.server.anthropic.answers import whole_message
from trioserve.server.anthropic.events import MessageEvents
from trioserve.server.framing import ReplyHead
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from trioserve.parsers.parts import Part

HEAD = ReplyHead(id="msg-1", created=0, model="small", system_fingerprint="")


class ScriptedReader:
    """Says these parts, one with each output."""

    finish_reason = "stop"
    num_reasoning_tokens = 3

    def __init__(self, parts: list[Part], *, at_once: bool) -> None:
        self._parts = [parts] if at_once else [[part] for part in parts]

    def read(self, _: CompletionOutput) -> list[Part]:
        return self._parts.pop(0)


def output(*, finished: bool) -> RequestOutput:
    reason = FinishReason.STOP if finished else None
    return RequestOutput(
        request_id="1",
        prompt="",
        prompt_token_ids=[1, 2],
        outputs=[CompletionOutput(0, "", [0, 0], finish_reason=reason)],
        finished=finished,
    )


def whole(parts: list[Part], *, shows_thinking: bool = True) -> dict[str, Any]:
    reader: Any = ScriptedReader(parts, at_once=True)
    message = whole_message(
        HEAD, output(finished=True), reader, UsageCounter(), shows_thinking=shows_thinking
    )
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(message))
    return told


def streamed(parts: list[Part], *, shows_thinking: bool = True) -> bytes:
    reader: Any = ScriptedReader(parts, at_once=False)
    writer = MessageEvents(HEAD, "1", reader, shows_thinking=shows_thinking)
    frames = [writer.write(0, output(finished=part is parts[-1])) for part in parts]
    return b"".join(frames) + writer.end()


ALL_KINDS: list[Part] = [
    ReasoningPart("Let me"),
    ReasoningPart(" see."),
    TextPart("It is"),
    TextPart(" so."),
    CallPart(0, "f", ""),
    CallPart(0, None, '{"a": '),
    CallPart(0, None, "1}"),
    CallPart(1, "g", ""),
    CallPart(1, None, "{}"),
    TextPart("And more"),
]


def test_all_kinds_of_blocks_in_their_order() -> None:
    message = whole(ALL_KINDS)
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    assert blocks == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "unsigned"},
        {"type": "text", "text": "It is so.", "citations": None},
        {"type": "tool_use", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "name": "g", "input": {}},
        {"type": "text", "text": "And more", "citations": None},
    ]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


@pytest.mark.parametrize("shows_thinking", [True, False])
@pytest.mark.parametrize("length", range(1, len(ALL_KINDS) + 1))
def test_a_stream_tells_the_same_blocks(length: int, shows_thinking: bool) -> None:
    parts = ALL_KINDS[:length]
    told = without_ids(accumulate(streamed(parts, shows_thinking=shows_thinking)))
    assert told["content"] == without_ids(whole(parts, shows_thinking=shows_thinking))["content"]


def test_the_signature_ends_a_block_of_thinking() -> None:
    deltas = [
        event["delta"]["type"]
        for name, event in events_of(streamed(ALL_KINDS))
        if "delta" in name and "index" in event
    ]
    assert deltas[:3] == ["thinking_delta", "thinking_delta", "signature_delta"]


def test_thinking_that_is_omitted_leaves_an_empty_block() -> None:
    message = whole(ALL_KINDS, shows_thinking=False)
    assert message["content"][0]["thinking"] == ""
    assert message["content"][0]["type"] == "thinking"


def test_usage_counts_all_tokens_of_a_stream() -> None:
    usage = accumulate(streamed(ALL_KINDS))["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (2, 2 * len(ALL_KINDS))
