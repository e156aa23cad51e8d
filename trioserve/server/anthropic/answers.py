"""What a turn says, as a message of Anthropic's API."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.parsers.parts import CallPart, ReasoningPart, TextPart
from trioserve.server.protocol.anthropic_answers import (
    Message,
    MessageUsage,
    OutputTokensDetails,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.parsers.parts import Part
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.anthropic_answers import ContentBlock, StopReason
    from trioserve.server.turns import AnswerReader
    from trioserve.server.usage import UsageCounter

__all__ = ["SIGNATURE", "message_usage", "new_call_id", "stop_of", "whole_message"]

SIGNATURE = "unsigned"
"""Of thinking. Clients hand it back, and some leave out blocks without one; here it is not looked at."""

_STOP_REASONS: dict[str | None, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}


def new_call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def stop_of(completion: CompletionOutput, reader: AnswerReader) -> tuple[StopReason, str | None]:
    """Of a completion that was read to its end: why it stopped, and the stop sequence that did it, if any.

    Whole calls that a stop sequence follows are calls to be made.
    """
    reason = reader.finish_reason
    if reason == "stop" and isinstance(completion.stop_reason, str):
        return "stop_sequence", completion.stop_reason
    return _STOP_REASONS.get(reason, "end_turn"), None


def message_usage(counter: UsageCounter, num_thinking_tokens: int) -> MessageUsage:
    return MessageUsage(
        input_tokens=counter.prompt_tokens - counter.cached_tokens,
        cache_read_input_tokens=counter.cached_tokens,
        output_tokens=counter.completion_tokens,
        output_tokens_details=OutputTokensDetails(num_thinking_tokens),
    )


def whole_message(
    head: ReplyHead,
    output: RequestOutput,
    reader: AnswerReader,
    counter: UsageCounter,
    *,
    shows_thinking: bool,
) -> Message:
    """The answer in one piece; `counter` has counted nothing yet."""
    (completion,) = output.outputs
    counter.add_prompt(output)
    counter.completion_tokens += len(completion.token_ids)
    blocks = _blocks(reader.read(completion), shows_thinking=shows_thinking)
    stop_reason, stop_sequence = stop_of(completion, reader)
    return Message(
        id=head.id,
        model=head.model,
        content=blocks,
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=message_usage(counter, reader.num_reasoning_tokens),
    )


def _blocks(parts: Iterable[Part], *, shows_thinking: bool) -> Sequence[ContentBlock]:
    blocks: list[ContentBlock] = []
    arguments: list[list[str]] = []
    for part in parts:
        last = blocks[-1] if blocks else None
        match part:
            case TextPart(text):
                if isinstance(last, TextBlock):
                    last.text += text
                else:
                    blocks.append(TextBlock(text))
            case ReasoningPart(text):
                if not isinstance(last, ThinkingBlock):
                    blocks.append(last := ThinkingBlock("", SIGNATURE))
                last.thinking += text if shows_thinking else ""
            case CallPart():
                if part.name is not None:
                    blocks.append(ToolUseBlock(new_call_id(), part.name, {}))
                    arguments.append([])
                arguments[-1].append(part.arguments)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    for call, pieces in zip(calls, arguments, strict=True):
        call.input = _object("".join(pieces))
    return blocks


def _object(arguments: str) -> dict[str, Any]:
    """Of arguments that the token limit or a stop sequence cut off, nothing: the stop reason tells."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
