"""What a turn's answer may be, by what the request asks for and what is known of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.parsers.answer_form import AnswerForm, ReasoningForm
from trioserve.server.protocol.tool_schemas import arguments_schema
from trioserve.server.tool_calls.held_calls import form_or_calls, strict_calls

if TYPE_CHECKING:
    from trioserve.parsers.call_format import CallFormat
    from trioserve.parsers.model_parsers import ModelParsers
    from trioserve.sampling_params import SamplingParams
    from trioserve.server.protocol.chat import ChatCompletionRequest
    from trioserve.server.protocol.tools import FunctionDefinition
    from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["answer_form", "fit_params"]


def answer_form(parsers: ModelParsers, request: ChatCompletionRequest, prompt: str) -> AnswerForm:
    """How the answer to this prompt is read.

    Raises:
      InvalidRequestError: the model may call, and nobody knows how it does.
    """
    calls = _call_format(parsers, request)
    shows_all = request.skip_special_tokens is False
    return AnswerForm(
        must_call=request.must_call,
        named_function=request.named_function,
        calls=calls,
        functions={} if calls is None else {f.name: arguments_schema(f) for f in _functions(request)},
        reasoning=_reasoning_form(parsers, request, prompt),
        hidden=None if shows_all else parsers.hidden_tokens(reads_calls=calls is not None),
    )


def fit_params(params: SamplingParams, request: ChatCompletionRequest, form: AnswerForm) -> SamplingParams:
    """`params` for an answer that will be read in this form."""
    wanted = params.structured_outputs
    if form.calls is not None:
        wanted = _with_calls(wanted, form.calls, _functions(request))
    if wanted is not None and form.reasoning is not None:
        wanted = _after_reasoning(wanted, form.reasoning)
    skips_special = params.skip_special_tokens and form.hidden is None
    if wanted is params.structured_outputs and skips_special == params.skip_special_tokens:
        return params
    return attrs.evolve(params, structured_outputs=wanted, skip_special_tokens=skips_special)


def _functions(request: ChatCompletionRequest) -> list[FunctionDefinition]:
    return [tool.function for tool in request.tools or ()]


def _call_format(parsers: ModelParsers, request: ChatCompletionRequest) -> CallFormat | None:
    if not request.tools or request.must_call or request.tool_choice == "none":
        return None
    if parsers.calls is None:
        raise InvalidRequestError(
            'tool_choice must be "none", "required" or the name of a function, got "auto" (the default): how '
            "this model writes tool calls is not known (--tool-call-parser).",
            parameter="tool_choice",
        )
    return parsers.calls


def _reasoning_form(
    parsers: ModelParsers, request: ChatCompletionRequest, prompt: str
) -> ReasoningForm | None:
    marks = parsers.reasoning
    if marks is None:
        return None
    if request.continue_final_message:
        is_open = marks.is_open_within(request.messages[-1].text() or "")
        return ReasoningForm(marks=marks, is_open=is_open, is_closed=not is_open)
    return ReasoningForm(
        marks=marks, is_open=marks.is_open_after(prompt), is_closed=marks.is_closed_after(prompt)
    )


def _with_calls(
    wanted: StructuredOutputsParams | None, calls: CallFormat, functions: list[FunctionDefinition]
) -> StructuredOutputsParams | None:
    if wanted is not None:
        return form_or_calls(wanted, calls.strict, functions)
    return None if calls.strict is None else strict_calls(calls.strict, functions)


def _after_reasoning(wanted: StructuredOutputsParams, reasoning: ReasoningForm) -> StructuredOutputsParams:
    if reasoning.is_closed or wanted.free_until is not None:
        return wanted
    marks = reasoning.marks
    return attrs.evolve(wanted, free_from=None if reasoning.is_open else marks.start, free_until=marks.end)
