"""The request fields that a chat has beside its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs

from trioserve.server.protocol.sampling import SamplingFields
from trioserve.server.protocol.tool_schemas import MAX_CALLS, arguments_form, calls_form
from trioserve.server.protocol.tools import (
    AllowedToolsChoice,
    FunctionChoice,
    FunctionDefinition,
    FunctionTool,
    NamedFunction,
    NamedToolChoice,
    ToolChoice,
)

if TYPE_CHECKING:
    from typing import Self

    from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["ChatFields"]

_FUNCTION_NAMES = {
    "structured_outputs": "functions",
    "structural_tag": "functions",
    "json": "functions",
    "tools": "functions",
    "tool_choice": "function_call",
}


@attrs.frozen(kw_only=True)
class ChatFields(SamplingFields):
    max_completion_tokens: int | None = None
    """Wins over `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    """None: yes, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    echo: bool | None = None
    """A last message of the assistant's comes back at the beginning of the answer."""
    add_special_tokens: bool | None = None
    """Those that the tokenizer adds to texts, beside what the template writes."""
    chat_template: str | None = None
    """Instead of the model's; only where the server trusts its clients with that."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """For templates that know of it, as `reasoning_effort` is."""
    include_reasoning: bool | None = None
    """False: the answer is without it, though not the usage."""
    tools: list[FunctionTool] | None = None
    """Shown to the template."""
    tool_choice: ToolChoice | None = None
    """With tools: "auto" (the default), "required" (at least one call), a function (one call of it), or
    "none"; or for some of the tools only."""
    parallel_tool_calls: bool | None = None
    """False: one call at most. Else it is up to MAX_CALLS where they are required."""
    functions: list[FunctionDefinition] | None = None
    """OpenAI's older way of giving tools. The answer has at most one call, as `function_call`."""
    function_call: FunctionChoice | None = None
    return_prompt_text: bool | None = None
    metadata: dict[str, str] | None = None
    """Comes back with the answer."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    """All are served alike, which the answer says."""

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def simplified(self) -> Self:
        """The same by `tools` alone: functions are tools, and those that are allowed are all there are."""
        if self.functions:
            tools = [FunctionTool(type="function", function=function) for function in self.functions]
            chosen = self.function_call
            choice = (
                NamedToolChoice(type="function", function=chosen)
                if isinstance(chosen, NamedFunction)
                else chosen
            )
            return attrs.evolve(self, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        if isinstance(self.tool_choice, AllowedToolsChoice):
            allowed = self.tool_choice.allowed_tools
            names = {tool.function.name for tool in allowed.tools}
            tools = [tool for tool in self.tools or () if tool.function.name in names]
            return attrs.evolve(self, tools=tools, tool_choice=allowed.mode)
        return self

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
        if self.tools and (self.must_call or super().output_form is None):
            names |= {"structured_outputs": "tools", "structural_tag": "tools", "json": "tools"}
        if self.functions:
            names |= _FUNCTION_NAMES
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
        if self.verbosity is not None:
            given["verbosity"] = self.verbosity
        return given | (self.chat_template_kwargs or {})
