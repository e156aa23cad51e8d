"""POST /v1/chat/completions: the requests, the response, the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from msgspec import UNSET, UnsetType

from trioserve.outputs import TokenLogprobs
from trioserve.server.protocol.chat_fields import ChatFields
from trioserve.server.protocol.messages import ChatMessage
from trioserve.server.protocol.tools import CalledFunction, FunctionDelta, MessageToolCall, ToolCallDelta
from trioserve.server.protocol.usage import Usage

__all__ = [
    "AssistantMessage",
    "ChatBatchRequest",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatLogprobs",
    "ChatTokenLogprob",
    "ChatTopLogprob",
    "Delta",
]


@attrs.frozen(kw_only=True)
class ChatCompletionRequest(ChatFields):
    messages: list[ChatMessage]

    @property
    def echoed_text(self) -> str:
        """What the answer begins with."""
        last = self.messages[-1]
        return (last.text() or "") if self.echo and last.role == "assistant" else ""


@attrs.frozen(kw_only=True)
class ChatBatchRequest(ChatFields):
    """Several conversations that get an answer each, by the same parameters."""

    messages: list[list[ChatMessage]]

    def requests(self) -> list[ChatCompletionRequest]:
        """One for each conversation."""
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(ChatFields)}
        return [ChatCompletionRequest(messages=messages, **fields) for messages in self.messages]


@attrs.define
class ChatTopLogprob:
    token: str
    logprob: float
    bytes: list[int]
    """UTF-8 of the token; tokens may hold parts of characters."""


@attrs.define
class ChatTokenLogprob:
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]
    """The most likely tokens, best first; the sampled one only if it is among them."""


@attrs.define
class ChatLogprobs:
    content: list[ChatTokenLogprob]
    refusal: None = None


@attrs.define
class AssistantMessage:
    content: str | None
    """None where there are tool calls instead."""
    role: str = "assistant"
    refusal: None = None
    annotations: list[Any] = attrs.Factory(list)
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    """Instead of `tool_calls`, to requests that gave `functions`."""
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same again: some clients read this one, and some the other."""


@attrs.define(kw_only=True)
class ChatChoice:
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: Sequence[int] | UnsetType = UNSET


@attrs.define(kw_only=True)
class ChatCompletion:
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str
    metadata: dict[str, str] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: Sequence[TokenLogprobs | None] | UnsetType = UNSET


@attrs.define
class Delta:
    """Keys that are not set are not sent."""

    content: str | UnsetType | None = UNSET
    role: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same again, as in a whole message."""


@attrs.define
class ChatChunkChoice:
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


@attrs.define(kw_only=True)
class ChatCompletionChunk:
    """What `framing` writes of a stream, for those who are to read it."""

    id: str
    object: str
    created: int
    model: str
    service_tier: str | None
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    """One, or none beside the usage at the end."""
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """In the first chunk only, as the next one."""
    prompt_text: str | UnsetType = UNSET
