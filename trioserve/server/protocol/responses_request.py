"""The request of POST /v1/responses, as in OpenAI's description (CreateResponse), with vLLM's extensions."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.sampling_params import RepetitionDetection
from trioserve.server.protocol.lists import shorten
from trioserve.server.protocol.responses_items import InputItem
from trioserve.server.protocol.tools import FunctionDefinition
from trioserve.structured_outputs import StructuredOutputsParams

__all__ = [
    "AllowedTool",
    "Includable",
    "PromptFields",
    "ReasoningOptions",
    "ResponseStreamOptions",
    "ResponsesRequest",
    "ResponsesTool",
    "ResponsesToolChoice",
    "TextFormat",
    "TextOptions",
    "TokenCountRequest",
]

LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""Only the last one has an effect: of the others there is never anything."""

_FORMAT_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@attrs.frozen(kw_only=True)
class ResponsesTool:
    """A function; there are no built-in tools."""

    type: Literal["function"]
    name: str
    """1 to 64 of a-z, A-Z, 0-9, _ and -."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, which are an object; without one there are no arguments."""
    strict: bool | None = None
    """True: a schema of which a part cannot be enforced is refused. Else that part is left to the model."""

    def __attrs_post_init__(self) -> None:
        self.definition()

    def definition(self) -> FunctionDefinition:
        """The same for chats. Raises InvalidRequestError: name or parameters are wrong."""
        return FunctionDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )


@attrs.frozen(kw_only=True)
class AllowedTool:
    type: Literal["function"]
    name: str


@attrs.frozen(kw_only=True)
class ResponsesToolChoice:
    """One function that is to be called, or those of the tools that may be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("name",) if self.type == "function" else ("mode", "tools"):
            if not getattr(self, name):
                raise InvalidRequestError(f"A choice of type {self.type!r} needs {name}.", parameter=name)


@attrs.frozen(kw_only=True)
class TextFormat:
    """What form the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Without an effect: a schema is always kept to."""

    def __attrs_post_init__(self) -> None:
        if self.type != "json_schema":
            return
        if self.schema is None:
            raise InvalidRequestError('The type "json_schema" needs a schema.', parameter="schema")
        if self.name is None or not _FORMAT_NAME.fullmatch(self.name):
            raise InvalidRequestError(
                f"A format's name has 1 to 64 of a-z, A-Z, 0-9, _ and -, got {shorten(self.name)}.",
                parameter="name",
            )

    @property
    def constrains(self) -> bool:
        """False for plain text."""
        return self.type != "text"


@attrs.frozen(kw_only=True)
class TextOptions:
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """For templates that know of it."""


@attrs.frozen(kw_only=True)
class ReasoningOptions:
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For templates that know of it."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Without an effect: the text itself is shown, and none is summed up."""


@attrs.frozen(kw_only=True)
class ResponseStreamOptions:
    include_obfuscation: bool | None = None
    """Without an effect: events are never padded."""


@attrs.frozen(kw_only=True)
class PromptFields:
    """What the prompt is made of."""

    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    """A system message before all others; it does not carry over to the next response."""
    previous_response_id: str | None = None
    """What was said until then comes before `input`."""
    tools: list[ResponsesTool] | None = None
    """Shown to the template."""
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: one call at most."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """"auto": what does not fit into the context is dropped from the beginning, item by item."""
    chat_template: str | None = None
    """Instead of the model's; only where the server trusts its clients with that."""
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def items(self) -> list[InputItem]:
        """Of `input`; a text is a message of the user's."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input or []

    @property
    def format(self) -> TextFormat | None:
        return None if self.text is None else self.text.format

    @property
    def named_function(self) -> str | None:
        """The one that has to be called."""
        choice = self.tool_choice
        is_function = isinstance(choice, ResponsesToolChoice) and choice.type == "function"
        return choice.name if is_function else None  # type: ignore[union-attr]  # as just looked at

    @property
    def allowed_tools(self) -> list[ResponsesTool]:
        """Those that may be called."""
        choice = self.tool_choice
        if not isinstance(choice, ResponsesToolChoice) or choice.tools is None:
            return self.tools or []
        names = {tool.name for tool in choice.tools}
        return [tool for tool in self.tools or () if tool.name in names]

    @property
    def choice_mode(self) -> Literal["none", "auto", "required"] | None:
        """The choice, if it is of no one function."""
        if isinstance(self.tool_choice, ResponsesToolChoice):
            return self.tool_choice.mode
        return self.tool_choice

    @property
    def must_call(self) -> bool:
        """The answer is tool calls and nothing else."""
        return self.choice_mode == "required" or self.named_function is not None


@attrs.frozen(kw_only=True)
class TokenCountRequest(PromptFields):
    """POST /v1/responses/input_tokens."""


@attrs.frozen(kw_only=True)
class ResponsesRequest(PromptFields):
    """None always means "not given": the model's default, then ours, holds. Ranges and meanings of the fields
    of sampling are those of `trioserve.sampling_params.SamplingParams`."""

    max_output_tokens: int | None = None
    """With those of reasoning."""
    max_tool_calls: int | None = None
    """Without an effect: it is about built-in tools."""
    include: list[Includable] | None = None
    top_logprobs: int | None = None
    """More than 0 asks for logprobs, as `include` does."""
    store: bool | None = None
    """None: yes, if the server keeps any."""
    background: bool | None = None
    """Answer at once; the response goes on by itself, and is asked for by its id."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    """At most 16; names of up to 64 characters, values of up to 512. They come back with the response."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    """All are served alike, which the response says."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    """-1: no limit."""
    structured_outputs: StructuredOutputsParams | None = None
    """The other way of `text.format`; only one of the two may constrain the output."""
    vllm_xargs: dict[str, Any] | None = None
    """For custom logits processors."""
    extra_args: dict[str, Any] | None = None
    """Another spelling of `vllm_xargs`."""
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    """Seconds that the response may take, from its request's headers to its last token."""

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no logprobs at all."""
        wanted = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None
