"""POST /v1/messages and /v1/messages/count_tokens: the requests, as Anthropic's API has them."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.anthropic_messages import InputMessage, InputTextBlock
from trioserve.server.protocol.tools import FunctionDefinition

__all__ = [
    "ConversationRequest",
    "InputTool",
    "InputToolChoice",
    "JsonOutputFormat",
    "MessagesRequest",
    "OutputConfig",
    "ThinkingConfig",
]


@attrs.frozen(kw_only=True)
class InputTool:
    """A function of the client's. Tools that a server would have to run are refused."""

    name: str
    type: str | None = None
    """ "custom", or nothing."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    """JSON schema of the arguments, which are an object."""
    strict: bool | None = None

    def __attrs_post_init__(self) -> None:
        if self.type not in {None, "custom"}:
            raise InvalidRequestError(
                f'type must be "custom" or null, got {self.type!r}: this server runs no tools.',
                parameter="type",
            )
        if self.input_schema is None:
            raise InvalidRequestError("A tool needs one.", parameter="input_schema")
        try:
            self.definition()
        except InvalidRequestError as error:
            field = "name" if error.parameter == "name" else "input_schema.type"
            raise InvalidRequestError(str(error), parameter=field) from None

    def definition(self) -> FunctionDefinition:
        """The same in OpenAI's terms."""
        return FunctionDefinition(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )


@attrs.frozen(kw_only=True)
class InputToolChoice:
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the type "tool"."""
    disable_parallel_tool_use: bool | None = None

    def __attrs_post_init__(self) -> None:
        if self.type == "tool" and self.name is None:
            raise InvalidRequestError('The type "tool" needs a name.', parameter="name")

    @property
    def must_call(self) -> bool:
        return self.type in {"any", "tool"}


@attrs.frozen(kw_only=True)
class ThinkingConfig:
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    """Tokens after which a model that thinks is made to stop thinking."""
    display: Literal["summarized", "omitted"] | None = None
    """"omitted": blocks of thinking have no text. Summaries are not made: the text is all of it."""

    def __attrs_post_init__(self) -> None:
        if self.type == "enabled" and (self.budget_tokens is None or self.budget_tokens < 1):
            raise InvalidRequestError(
                f'The type "enabled" needs a budget_tokens >= 1, got {self.budget_tokens}.',
                parameter="budget_tokens",
            )


@attrs.frozen(kw_only=True)
class JsonOutputFormat:
    type: Literal["json_schema"]
    schema: dict[str, Any]


@attrs.frozen(kw_only=True)
class OutputConfig:
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """For chat templates that know `reasoning_effort`."""
    format: JsonOutputFormat | None = None


@attrs.frozen(kw_only=True)
class ConversationRequest:
    """What decides about the prompt."""

    model: str | None = None
    messages: list[InputMessage]
    """Neighbours of one role are one message. If the last is the assistant's, the answer goes on with it."""
    system: str | list[InputTextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: ThinkingConfig | None = None
    """None: disabled, where the chat template knows `enable_thinking`; unless `effort` is given."""
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: float | None = None
    """Seconds that the request may take, from its headers to its last token."""

    @property
    def must_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.must_call

    @property
    def output_format(self) -> JsonOutputFormat | None:
        return None if self.output_config is None else self.output_config.format

    @property
    def field_names(self) -> dict[str, str]:
        """What a chat completion calls a parameter -> Anthropic's field."""
        form = "tools" if self.must_call or self.output_format is None else "output_config.format"
        return {
            "prompt": "messages",
            "max_completion_tokens": "max_tokens",
            "stop": "stop_sequences",
            "structured_outputs": form,
            "structural_tag": form,
            "response_format": form,
            "json": form,
            "thinking_token_budget": "thinking.budget_tokens",
            "reasoning_effort": "output_config.effort",
            "continue_final_message": "messages",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        }


@attrs.frozen(kw_only=True)
class MessagesRequest(ConversationRequest):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    """For custom logits processors."""
