"""The events of a streamed message (https://docs.anthropic.com/en/api/messages-streaming)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trioserve.parsers.parts import CallPart, ReasoningPart, TextPart
from trioserve.server.anthropic.answers import SIGNATURE, message_usage, new_call_id, stop_of
from trioserve.server.error_envelopes import anthropic_error
from trioserve.server.protocol.anthropic_answers import (
    ContentBlockDeltaEvent,
    ContentBlockStartEvent,
    ContentBlockStopEvent,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageDeltaEvent,
    MessageStartEvent,
    MessageStopEvent,
    PingEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.parsers.parts import Part
    from trioserve.server.errors import Failure
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.anthropic_answers import AnthropicErrorResponse, AnyEvent, ContentBlock
    from trioserve.server.turns import AnswerReader

__all__ = ["MessageEvents"]

_encode = msgspec.json.Encoder().encode


def _frame(event: AnyEvent | AnthropicErrorResponse) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), _encode(event))


class MessageEvents:
    """A `ChunkWriter`: the message's head, its blocks one after the other, and its end."""

    def __init__(
        self, head: ReplyHead, request_id: str, reader: AnswerReader, *, shows_thinking: bool
    ) -> None:
        """`request_id`: the HTTP request's, for an error."""
        self._head = head
        self._request_id = request_id
        self._reader = reader
        self._shows_thinking = shows_thinking
        self._usage = UsageCounter()
        self._started = False
        # The block that is open, if any; `_index` is that of the last one that was opened.
        self._open: type[Part] | None = None
        self._index = -1

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        frames = [] if self._started else self._start(output)
        for completion in output.outputs:
            self._usage.completion_tokens += len(completion.token_ids)
            for part in self._reader.read(completion):
                frames += self._write_part(part)
            if completion.finish_reason is not None:
                frames += self._finish(completion)
        return b"".join(frames)

    def end(self) -> bytes:
        return _frame(MessageStopEvent())

    def fail(self, failure: Failure) -> bytes:
        return _frame(anthropic_error(failure.status, failure.detail, self._request_id))

    def _start(self, output: RequestOutput) -> list[bytes]:
        self._started = True
        self._usage.add_prompt(output)
        message = Message(
            id=self._head.id,
            model=self._head.model,
            content=(),
            stop_reason=None,
            stop_sequence=None,
            usage=message_usage(self._usage, 0),
        )
        return [_frame(MessageStartEvent(message)), _frame(PingEvent())]

    def _write_part(self, part: Part) -> list[bytes]:
        begins = type(part) is not self._open or (isinstance(part, CallPart) and part.name is not None)
        frames = self._begin_block(part) if begins else []
        match part:
            case TextPart(text):
                frames.append(self._delta(TextDelta(text)))
            case ReasoningPart(text):
                if self._shows_thinking:
                    frames.append(self._delta(ThinkingDelta(text)))
            case CallPart():
                if part.arguments:
                    frames.append(self._delta(InputJsonDelta(part.arguments)))
        return frames

    def _begin_block(self, part: Part) -> list[bytes]:
        frames = self._end_block()
        self._open = type(part)
        self._index += 1
        return [*frames, _frame(ContentBlockStartEvent(self._index, _empty_block(part)))]

    def _end_block(self) -> list[bytes]:
        if self._open is None:
            return []
        signature = [self._delta(SignatureDelta(SIGNATURE))] if self._open is ReasoningPart else []
        self._open = None
        return [*signature, _frame(ContentBlockStopEvent(self._index))]

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> bytes:
        return _frame(ContentBlockDeltaEvent(self._index, delta))

    def _finish(self, completion: CompletionOutput) -> list[bytes]:
        stop_reason, stop_sequence = stop_of(completion, self._reader)
        usage = message_usage(self._usage, self._reader.num_reasoning_tokens)
        end = MessageDeltaEvent(MessageDelta(stop_reason, stop_sequence), usage)
        return [*self._end_block(), _frame(end)]


def _empty_block(part: Part) -> ContentBlock:
    match part:
        case TextPart():
            return TextBlock("")
        case ReasoningPart():
            return ThinkingBlock("", "")
        case CallPart():
            assert part.name is not None, "a call begins with its name"
            return ToolUseBlock(new_call_id(), part.name, {})
