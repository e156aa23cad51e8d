"""From a request of Anthropic's API to the chat completion that it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.server.protocol.anthropic import MessagesRequest
from trioserve.server.protocol.anthropic_messages import join_texts
from trioserve.server.protocol.chat import ChatCompletionRequest
from trioserve.server.protocol.messages import ChatMessage, FunctionCall, ToolCall
from trioserve.server.protocol.response_format import JsonSchemaFormat, ResponseFormat
from trioserve.server.protocol.tools import FunctionTool, NamedFunction, NamedToolChoice

if TYPE_CHECKING:
    from trioserve.server.protocol.anthropic import ConversationRequest
    from trioserve.server.protocol.anthropic_messages import InputBlock
    from trioserve.server.protocol.tools import ToolChoice

__all__ = ["chat_request"]


def chat_request(
    request: ConversationRequest, *, limits_thinking: bool, thinks_by_default: bool = False
) -> ChatCompletionRequest:
    """
    Args:
      limits_thinking: the engine knows where thinking ends. Where it does not, no budget is passed on: a
        model that does not think keeps to every one.
      thinks_by_default: whether to think is left to the template where the request does not say it.
    """
    messages = _chat_messages(request)
    return ChatCompletionRequest(
        model=request.model,
        messages=messages,
        continue_final_message=_is_open(messages[-1]) or None,
        tools=[FunctionTool(type="function", function=tool.definition()) for tool in request.tools or ()]
        or None,
        tool_choice=_tool_choice(request),
        parallel_tool_calls=_allows_parallel_calls(request),
        response_format=_response_format(request),
        reasoning_effort=None if request.output_config is None else request.output_config.effort,
        thinking_token_budget=_thinking_budget(request) if limits_thinking else None,
        chat_template_kwargs=_template_kwargs(request, thinks_by_default),
        **(_sampling(request) if isinstance(request, MessagesRequest) else {}),
    )


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    return {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stream": request.stream,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "vllm_xargs": request.vllm_xargs,
    }


# The conversation


@attrs.define
class _Turn:
    """One message of the chat, of one or more of the request's messages."""

    role: str
    texts: list[str] = attrs.field(factory=list)
    thoughts: list[str] = attrs.field(factory=list)
    calls: list[ToolCall] = attrs.field(factory=list)

    def take(self, block: InputBlock) -> None:
        """Redacted thinking is for the server that made it, so it is left out here."""
        match block.type:
            case "text":
                self.texts.append(block.text or "")
            case "thinking":
                self.thoughts.append(block.thinking or "")
            case "tool_use":
                call = FunctionCall(name=block.name or "", arguments=block.input or {})
                self.calls.append(ToolCall(id=block.id, function=call))

    def message(self) -> ChatMessage:
        return ChatMessage(
            role=self.role,
            content="\n".join(self.texts),
            tool_calls=self.calls or None,
            reasoning_content="\n".join(self.thoughts) or None,
        )


def _chat_messages(request: ConversationRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    turn: _Turn | None = None
    if request.system:
        turn = _Turn("system", [join_texts(request.system)])
    functions: dict[str | None, str | None] = {}
    for given in request.messages:
        for block in given.blocks():
            if block.type == "tool_use":
                functions[block.id] = block.name
            if turn is not None and (block.type == "tool_result" or turn.role != given.role):
                messages.append(turn.message())
                turn = None
            if block.type == "tool_result":
                messages.append(_tool_message(block, functions.get(block.tool_use_id)))
                continue
            turn = turn or _Turn(given.role)
            turn.take(block)
    return messages if turn is None else [*messages, turn.message()]


def _tool_message(block: InputBlock, function: str | None) -> ChatMessage:
    return ChatMessage(
        role="tool", content=block.result_text(), tool_call_id=block.tool_use_id, name=function
    )


def _is_open(last: ChatMessage) -> bool:
    """The answer goes on with it."""
    text = last.content
    return last.role == "assistant" and not last.tool_calls and isinstance(text, str) and bool(text.strip())


# The form of the answer


def _tool_choice(request: ConversationRequest) -> ToolChoice | None:
    choice = request.tool_choice
    if not request.tools or choice is None:
        return None
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return NamedToolChoice(type="function", function=NamedFunction(name=choice.name or ""))
        case _:
            return choice.type


def _allows_parallel_calls(request: ConversationRequest) -> bool | None:
    """None leaves it at the default, which is yes."""
    choice = request.tool_choice
    return False if request.tools and choice is not None and choice.disable_parallel_tool_use else None


def _response_format(request: ConversationRequest) -> ResponseFormat | None:
    if (form := request.output_format) is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="output", schema=form.schema))


# Thinking


def _thinking_budget(request: ConversationRequest) -> int | None:
    thinking = request.thinking
    return None if thinking is None or thinking.type != "enabled" else thinking.budget_tokens


def _template_kwargs(request: ConversationRequest, thinks_by_default: bool) -> dict[str, Any] | None:
    """Clients that do not ask for thinking may not know what to do with it, so it is off by default. Whoever
    says how hard to think leaves it to the template."""
    given = request.chat_template_kwargs or {}
    if request.thinking is not None:
        return {"enable_thinking": request.thinking.type != "disabled", **given}
    has_effort = request.output_config is not None and request.output_config.effort is not None
    return given or None if has_effort or thinks_by_default else {"enable_thinking": False, **given}
