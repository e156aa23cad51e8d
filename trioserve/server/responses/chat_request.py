"""A request of the Responses API as a chat, which is what turns are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.server.protocol.chat import ChatCompletionRequest
from trioserve.server.protocol.response_format import JsonSchemaFormat, ResponseFormat
from trioserve.server.protocol.responses_request import ResponsesRequest
from trioserve.server.protocol.tools import FunctionTool, NamedFunction, NamedToolChoice, ToolChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.server.protocol.messages import ChatMessage
    from trioserve.server.protocol.responses_request import PromptFields, TextFormat

__all__ = ["chat_request", "field_names"]

_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "skip_special_tokens", "allowed_token_ids", "bad_words", "repetition_detection",
    "thinking_token_budget", "structured_outputs", "vllm_xargs", "extra_args", "priority", "cache_salt",
)  # fmt: skip
"""Fields that chats have under the same name."""


def chat_request(
    request: PromptFields, messages: Sequence[ChatMessage], *, streams: bool = False
) -> ChatCompletionRequest:
    """The conversation is `messages`. With `streams` its outputs are wanted as they come."""
    tools = [
        FunctionTool(type="function", function=tool.definition()) for tool in request.allowed_tools
    ] or None
    return ChatCompletionRequest(
        model=request.model,
        messages=list(messages),
        tools=tools,
        tool_choice=None if tools is None else _tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=None if request.format is None else _response_format(request.format),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        verbosity=None if request.text is None else request.text.verbosity,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        stream=streams,
        **_generation_fields(request),
    )


def field_names(request: PromptFields) -> dict[str, str]:
    """What engine and chats call a parameter -> the field that the client used, for `naming`."""
    form = "structured_outputs"
    if request.must_call:
        form = "tools"
    elif getattr(request, "structured_outputs", None) is None:
        wants_text = request.format is None or request.format.type == "text"
        form = "tools" if wants_text and request.allowed_tools else "text.format"
    return {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "response_format": "text.format",
        "structured_outputs": form,
        "structural_tag": form,
        "json": form,
        "reasoning_effort": "reasoning.effort",
    }


def _generation_fields(request: PromptFields) -> dict[str, Any]:
    if not isinstance(request, ResponsesRequest):
        return {}
    num_top = request.num_top_logprobs
    return {
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": num_top is not None,
        "top_logprobs": num_top,
        **{name: getattr(request, name) for name in _SAME_NAME},
    }


def _tool_choice(request: PromptFields) -> ToolChoice | None:
    if request.named_function is not None:
        return NamedToolChoice(type="function", function=NamedFunction(name=request.named_function))
    return request.choice_mode


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    schema = JsonSchemaFormat(name=given.name or "", schema=given.schema, strict=given.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
