"""The readers of the Responses API: ranges, refusals and conflicts of its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.sampling_params import SamplingParams
from trioserve.server.protocol.lists import shorten
from trioserve.server.protocol.readers import MAX_MESSAGES, MAX_TOOLS
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.refusals import Refusal
from trioserve.server.protocol.responses_request import (
    PromptFields,
    ResponsesRequest,
    ResponsesToolChoice,
    TokenCountRequest,
)
from trioserve.validators import integer, number, optional

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RESPONSES_READER", "TOKEN_COUNT_READER"]

_PARAMS = attrs.fields_dict(SamplingParams)

MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512
"""Pairs, and characters of each; as in OpenAI's API."""

MAX_SAFETY_IDENTIFIER = 64
"""Characters; as in OpenAI's API."""


def _as(name: str, like: str) -> attrs.Attribute[Any]:
    return _PARAMS[like].evolve(name=name)


def _integer(name: str, allowed: str, least: int, most: int | None = None) -> attrs.Attribute[Any]:
    check = integer(allowed, least) if most is None else integer(allowed, least, most)
    return _PARAMS["max_tokens"].evolve(name=name, validator=optional(check))


_RANGES = {
    name: _PARAMS[name]
    for name in (
        "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "min_tokens", "allowed_token_ids",
        "bad_words",
    )
} | {
    "max_output_tokens": _as("max_output_tokens", like="max_tokens"),
    "max_tool_calls": _integer("max_tool_calls", "an integer >= 1", 1),
    "top_logprobs": _integer("top_logprobs", "an integer from 0 to 20", 0, 20),
    "thinking_token_budget": _integer(
        "thinking_token_budget", "an integer >= 0, or -1 for no limit", -1
    ),
    "timeout": _PARAMS["temperature"].evolve(
        name="timeout", validator=optional(number("a number of seconds > 0", above=0))
    ),
}  # fmt: skip

_PROMPT_REFUSALS = tuple(
    Refusal(name, "null")
    for name in ("context_management", "conversation", "moderation", "previous_input_messages", "prompt")
)

_REFUSALS = (
    *_PROMPT_REFUSALS,
    Refusal("enable_response_messages", "false or null", (False,)),
    Refusal("kv_transfer_params", "null or empty", ({},)),
    Refusal("n", "null or 1", (1,)),
)


def _oversized(values: Mapping[str, Any]) -> list[Problem]:
    items = values.get("input")
    if isinstance(items, list) and (number_of := _num_pieces(items)) > MAX_MESSAGES:
        sentence = f"input must hold at most {MAX_MESSAGES} items and parts in all, got {number_of}."
        return [Problem("input", sentence)]
    tools = values.get("tools")
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        return [Problem("tools", f"tools must hold at most {MAX_TOOLS} tools, got {len(tools)}.")]
    return []


def _num_pieces(items: list[Any]) -> int:
    """Items and parts: what becomes an object each."""
    return len(items) + sum(
        len(parts)
        for item in items
        if isinstance(item, dict)
        for parts in (item.get("content"), item.get("output"), item.get("summary"))
        if isinstance(parts, list)
    )


def _conflicts(request: ResponsesRequest) -> list[Problem]:
    problems = _prompt_conflicts(request) + _metadata_conflicts(request)
    if request.stream_options is not None and not request.stream:
        problems.append(Problem("stream_options", "stream_options is only allowed when stream is true."))
    if request.cache_salt is not None and not request.cache_salt:
        problems.append(Problem("cache_salt", "cache_salt must be a non-empty string, got ''."))
    if request.background and request.store is False:
        sentence = "background is only allowed when store is true: its response has to be asked for."
        problems.append(Problem("background", sentence))
    if len(request.safety_identifier or "") > MAX_SAFETY_IDENTIFIER:
        sentence = f"safety_identifier must be at most {MAX_SAFETY_IDENTIFIER} characters."
        problems.append(Problem("safety_identifier", sentence))
    return problems + _form_conflicts(request)


def _form_conflicts(request: ResponsesRequest) -> list[Problem]:
    """An answer has one form, and a call's is its function's."""
    forms = ["structured_outputs"] if request.structured_outputs is not None else []
    if request.format is not None and request.format.constrains:
        forms.append("text.format")
    if request.must_call:
        sentence = 'cannot be combined with a tool_choice that demands a call; "none" leaves it its effect.'
        return [Problem(name, f"{name} {sentence}") for name in forms]
    if len(forms) > 1:
        sentence = "text.format and structured_outputs cannot both say what form the output must have."
        return [Problem("text.format", sentence)]
    return []


def _metadata_conflicts(request: ResponsesRequest) -> list[Problem]:
    metadata = request.metadata or {}
    problems = []
    if len(metadata) > MAX_METADATA:
        sentence = f"metadata must hold at most {MAX_METADATA} pairs, got {len(metadata)}."
        problems.append(Problem("metadata", sentence))
    if any(len(name) > MAX_METADATA_NAME for name in metadata):
        sentence = f"metadata must have names of at most {MAX_METADATA_NAME} characters."
        problems.append(Problem("metadata", sentence))
    if any(len(value) > MAX_METADATA_VALUE for value in metadata.values()):
        sentence = f"metadata must have values of at most {MAX_METADATA_VALUE} characters."
        problems.append(Problem("metadata", sentence))
    return problems


def _prompt_conflicts(request: PromptFields) -> list[Problem]:
    problems = []
    if not request.items and request.previous_response_id is None:
        sentence = "input must be a text or at least one item, or previous_response_id must be given."
        problems.append(Problem("input", sentence))
    if request.previous_response_id is not None and not request.previous_response_id:
        sentence = "previous_response_id must be the id of a response, got ''."
        problems.append(Problem("previous_response_id", sentence))
    for name in ("chat_template", "tokenize"):
        if name in (request.chat_template_kwargs or {}):
            path = f"chat_template_kwargs.{name}"
            problems.append(Problem(path, f"{path} must not be given: it is the server's to choose."))
    return problems + _tool_conflicts(request)


def _tool_conflicts(request: PromptFields) -> list[Problem]:
    problems = []
    names: set[str] = set()
    for index, tool in enumerate(request.tools or ()):
        if tool.name in names:
            path = f"tools[{index}].name"
            problems.append(
                Problem(path, f"{path} must differ from those of other tools, got {tool.name!r}.")
            )
        names.add(tool.name)
    if not names and (request.must_call or isinstance(request.tool_choice, ResponsesToolChoice)):
        return [*problems, Problem("tool_choice", "tool_choice is only allowed when tools are given.")]
    if request.named_function is not None and request.named_function not in names:
        problems.append(_unknown_tool("tool_choice.name", request.named_function))
    choice = request.tool_choice
    if isinstance(choice, ResponsesToolChoice):
        problems += [
            _unknown_tool(f"tool_choice.tools[{index}].name", tool.name)
            for index, tool in enumerate(choice.tools or ())
            if tool.name not in names
        ]
    return problems


def _unknown_tool(path: str, name: str) -> Problem:
    return Problem(path, f"{path} must be the name of one of the tools, got {shorten(name)}.")


_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tools": {"maxItems": MAX_TOOLS},
    "previous_response_id": {"minLength": 1},
}

RESPONSES_READER = RequestReader(
    kind=ResponsesRequest,
    ranges=_RANGES,
    refusals=_REFUSALS,
    shapes={
        **_SHAPES,
        "cache_salt": {"minLength": 1},
        "metadata": {"maxProperties": MAX_METADATA},
        "safety_identifier": {"maxLength": MAX_SAFETY_IDENTIFIER},
    },
    oversized=_oversized,
    conflicts=_conflicts,
)

TOKEN_COUNT_READER = RequestReader(
    kind=TokenCountRequest,
    ranges={},
    refusals=_PROMPT_REFUSALS,
    shapes=_SHAPES,
    oversized=_oversized,
    conflicts=_prompt_conflicts,
)
