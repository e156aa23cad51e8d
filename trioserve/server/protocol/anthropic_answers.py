"""What Anthropic's API answers: a message, the events of a streamed one, an error.

Keys and values are those that the official clients read (`anthropic` on PyPI, `@anthropic-ai/sdk` on npm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs

__all__ = [
    "AnthropicError",
    "AnthropicErrorResponse",
    "AnyEvent",
    "ContentBlock",
    "ContentBlockDeltaEvent",
    "ContentBlockStartEvent",
    "ContentBlockStopEvent",
    "InputJsonDelta",
    "Message",
    "MessageDelta",
    "MessageDeltaEvent",
    "MessageStartEvent",
    "MessageStopEvent",
    "MessageUsage",
    "OutputTokensDetails",
    "PingEvent",
    "SignatureDelta",
    "StopReason",
    "TextBlock",
    "TextDelta",
    "ThinkingBlock",
    "ThinkingDelta",
    "TokenCount",
    "ToolUseBlock",
]


@attrs.frozen
class AnthropicError:
    type: str
    message: str


@attrs.frozen
class AnthropicErrorResponse:
    error: AnthropicError
    request_id: str | None
    type: str = "error"


@attrs.define
class TextBlock:
    text: str
    type: str = "text"
    citations: None = None


@attrs.define
class ThinkingBlock:
    thinking: str
    signature: str
    type: str = "thinking"


@attrs.define
class ToolUseBlock:
    id: str
    name: str
    input: dict[str, Any]
    type: str = "tool_use"


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


@attrs.frozen
class OutputTokensDetails:
    thinking_tokens: int


@attrs.frozen(kw_only=True)
class MessageUsage:
    """Tokens; of a stream, so far. All tokens of the prompt are the first three together."""

    input_tokens: int
    """Neither found in the prefix cache nor, as everything is cached anyway, counted as its creation."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: str = "standard"


@attrs.define(kw_only=True)
class Message:
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: Sequence[ContentBlock]
    stop_reason: StopReason | None
    """None only where a stream begins."""
    stop_sequence: str | None
    """The one that ended the answer, with the stop reason of that name."""
    usage: MessageUsage


@attrs.frozen
class TokenCount:
    input_tokens: int


# Events of a stream


@attrs.frozen
class MessageStartEvent:
    message: Message
    type: str = "message_start"


@attrs.frozen
class PingEvent:
    type: str = "ping"


@attrs.frozen
class ContentBlockStartEvent:
    index: int
    content_block: ContentBlock
    """Empty as yet."""
    type: str = "content_block_start"


@attrs.frozen
class TextDelta:
    text: str
    type: str = "text_delta"


@attrs.frozen
class ThinkingDelta:
    thinking: str
    type: str = "thinking_delta"


@attrs.frozen
class SignatureDelta:
    """The last of a block of thinking."""

    signature: str
    type: str = "signature_delta"


@attrs.frozen
class InputJsonDelta:
    """More of a call's arguments, as JSON."""

    partial_json: str
    type: str = "input_json_delta"


@attrs.frozen
class ContentBlockDeltaEvent:
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta
    type: str = "content_block_delta"


@attrs.frozen
class ContentBlockStopEvent:
    index: int
    type: str = "content_block_stop"


@attrs.frozen
class MessageDelta:
    stop_reason: StopReason
    stop_sequence: str | None


@attrs.frozen
class MessageDeltaEvent:
    delta: MessageDelta
    usage: MessageUsage
    """Of the whole answer."""
    type: str = "message_delta"


@attrs.frozen
class MessageStopEvent:
    type: str = "message_stop"


AnyEvent = (
    MessageStartEvent
    | PingEvent
    | ContentBlockStartEvent
    | ContentBlockDeltaEvent
    | ContentBlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
)
