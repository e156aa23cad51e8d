"""POST /v1/chat/completions: the request, the response, the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from msgspec import UNSET, UnsetType

from trioserve.outputs import TokenLogprobs
from trioserve.server.protocol.messages import ChatMessage
from trioserve.server.protocol.sampling import SamplingFields
from trioserve.server.protocol.tool_schemas import MAX_CALLS, arguments_form, calls_form
from trioserve.server.protocol.tools import (
    FunctionTool,
    MessageToolCall,
    NamedToolChoice,
    ToolCallDelta,
    ToolChoice,
)
from trioserve.server.protocol.usage import Usage

if TYPE_CHECKING:
    from trioserve.structured_outputs import StructuredOutputsParams

__all__ = [
    "AssistantMessage",
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
class ChatCompletionRequest(SamplingFields):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """Wins over `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    """None: yes, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    chat_template: str | None = None
    """Instead of the model's; only where the server trusts its clients with that."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[FunctionTool] | None = None
    """Always shown to the template."""
    tool_choice: ToolChoice | None = None
    """With tools: "required" (at least one call), a function (one call of it), or "none"."""
    parallel_tool_calls: bool | None = None
    """False: "required" is exactly one call. Else it is up to MAX_CALLS."""

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def must_call(self) -> bool:
        """The answer is tool calls and nothing else."""
        return self.tool_choice == "required" or self.named_function is not None

    @property
    def named_function(self) -> str | None:
        """The one that has to be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None

    @property
    def output_form(self) -> StructuredOutputsParams | None:
        if not self.must_call:
            return super().output_form
        functions = [tool.function for tool in self.tools or ()]
        for function in functions:
            if function.name == self.named_function:
                return arguments_form(function)
        return calls_form(functions, max_calls=1 if self.parallel_tool_calls is False else MAX_CALLS)

    @property
    def field_names(self) -> dict[str, str]:
        names = super().field_names | {"logprobs": "top_logprobs"}
        if self.must_call:
            names |= {"structured_outputs": "tools", "json": "tools"}
        return (
            names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}
        )

    @property
    def adds_generation_prompt(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        given: dict[str, Any] = {}
        if self.documents is not None:
            given["documents"] = self.documents
        if self.reasoning_effort is not None:
            given["reasoning_effort"] = self.reasoning_effort
            given["enable_thinking"] = self.reasoning_effort != "none"
        return given | (self.chat_template_kwargs or {})


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
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: Sequence[TokenLogprobs | None] | UnsetType = UNSET


@attrs.define
class Delta:
    """Keys that are not set are not sent."""

    content: str | UnsetType | None = UNSET
    role: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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
