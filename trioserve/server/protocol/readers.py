"""The readers of the two APIs: which ranges, refusals and conflicts hold for their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.beam_search_params import BeamSearchParams
from trioserve.sampling_params import SamplingParams
from trioserve.server.protocol.chat import ChatCompletionRequest
from trioserve.server.protocol.completions import CompletionRequest
from trioserve.server.protocol.lists import shorten
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS
from trioserve.validators import integer, number, optional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.server.protocol.sampling import SamplingFields

__all__ = [
    "CHAT_READER",
    "COMPLETION_READER",
    "MAX_COMPLETIONS",
    "MAX_MESSAGES",
    "MAX_PROMPTS",
    "MAX_TOOLS",
]

MAX_COMPLETIONS = 2**14
"""Of all prompts of one completions request: each is a sequence of the engine's, and held until the end."""

MAX_MESSAGES = 2**14
"""Messages of one chat, the parts of their contents and their tool calls; each takes microseconds to read."""

MAX_PROMPTS = 2048
"""Prompts of one completions request; each is a request of the engine."""

MAX_TOOLS = 1024
"""Tools of one chat request: taking them apart holds up the event loop."""

_PARAMS = attrs.fields_dict(SamplingParams)

_SHARED = {
    name: _PARAMS[name]
    for name in (
        "n", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "min_tokens", "max_tokens",
        "prompt_logprobs", "allowed_token_ids", "bad_words",
    )
}  # fmt: skip

_NOT_IN_BEAM_SEARCH = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids",
    "min_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words", "repetition_detection",
    "thinking_token_budget",
)  # fmt: skip
"""Parameters that would have to act on what a search finds; those of the draw have nothing to act on."""


_SHAPES = {"cache_salt": {"minLength": 1}}


def _renamed(name: str, *, to: str) -> attrs.Attribute[Any]:
    return _PARAMS[name].evolve(name=to)


def _integer_from(least: int, name: str, allowed: str) -> attrs.Attribute[Any]:
    """`name` with another lower bound than the parameter of that name has."""
    return _PARAMS[name].evolve(validator=optional(integer(allowed, least)))


_SHARED |= {
    "timeout": _PARAMS["temperature"].evolve(
        name="timeout", validator=optional(number("a number of seconds > 0", above=0))
    ),
    "length_penalty": attrs.fields_dict(BeamSearchParams)["length_penalty"],
    "thinking_token_budget": _integer_from(
        -1, "thinking_token_budget", "an integer >= 0, or -1 for no limit"
    ),
}


def _shared_conflicts(request: SamplingFields) -> list[Problem]:
    problems = []
    if request.stream_options is not None and not request.stream:
        problems.append(Problem("stream_options", "stream_options is only allowed when stream is true."))
    if request.cache_salt is not None and not request.cache_salt:
        problems.append(Problem("cache_salt", "cache_salt must be a non-empty string, got ''."))
    if request.prompt_logprobs is not None and request.stream:
        problems.append(Problem("prompt_logprobs", "prompt_logprobs is only allowed when stream is false."))
    if request.response_format and request.response_format.constrains and request.structured_outputs:
        sentence = "response_format and structured_outputs cannot both say what form the output must have."
        problems.append(Problem("response_format", sentence))
    return problems + (_beam_search_conflicts(request) if request.use_beam_search else [])


def _beam_search_conflicts(request: SamplingFields) -> list[Problem]:
    problems = []
    if request.stream:
        sentence = "use_beam_search is only allowed when stream is false: nothing is final before the end."
        problems.append(Problem("use_beam_search", sentence))
    given = [
        name
        for name in _NOT_IN_BEAM_SEARCH
        if getattr(request, name) not in (None, [], {}, "", _PARAMS[name].default)
    ]
    if request.custom_args:
        given.append("vllm_xargs")
    return problems + [Problem(name, f"{name} cannot be combined with use_beam_search.") for name in given]


def _beam_logprobs_conflicts(request: SamplingFields, field: str, number: int | None) -> list[Problem]:
    """A search knows of each token those that it was chosen from: twice as many as it is wide."""
    known = 2 * (request.n or 1)
    if not request.use_beam_search or number is None or 0 <= number <= known:
        return []
    sentence = f"{field} must be from 0 to 2 * n ({known}) with use_beam_search, got {number}."
    return [Problem(field, sentence)]


def _chat_conflicts(request: ChatCompletionRequest) -> list[Problem]:
    problems = _shared_conflicts(request)
    if not request.messages:
        problems.append(Problem("messages", "messages must hold at least one message, got []."))
    if request.top_logprobs and not request.logprobs:
        problems.append(Problem("top_logprobs", "top_logprobs is only allowed when logprobs is true."))
    if request.add_generation_prompt and request.continue_final_message:
        sentence = "continue_final_message and add_generation_prompt cannot both be true."
        problems.append(Problem("continue_final_message", sentence))
    for name in ("chat_template", "tokenize"):
        if name in (request.chat_template_kwargs or {}):
            path = f"chat_template_kwargs.{name}"
            problems.append(Problem(path, f"{path} must not be given: it is the server's to choose."))
    if request.use_beam_search and request.token_limit is None:
        sentence = "max_completion_tokens must be given with use_beam_search."
        problems.append(Problem("max_completion_tokens", sentence))
    problems += _beam_logprobs_conflicts(request, "top_logprobs", request.num_top_logprobs)
    return problems + _tool_conflicts(request)


def _tool_conflicts(request: ChatCompletionRequest) -> list[Problem]:
    if request.tools is None:
        sentence = "tool_choice is only allowed when tools are given."
        return [] if request.tool_choice in {None, "none"} else [Problem("tool_choice", sentence)]
    if not request.tools:
        return [Problem("tools", "tools must hold at least one tool, got [].")]
    if request.tool_choice in {None, "auto"}:
        sentence = (
            'tool_choice must be "required", {"type": "function", "function": {"name": ...}} or "none" when '
            'tools are given: "auto", which is the default, is not supported.'
        )
        return [Problem("tool_choice", sentence)]
    return _function_name_conflicts(request) + _form_conflicts(request)


def _function_name_conflicts(request: ChatCompletionRequest) -> list[Problem]:
    names: set[str] = set()
    problems = []
    for index, tool in enumerate(request.tools or ()):
        name = tool.function.name
        if name in names:
            path = f"tools[{index}].function.name"
            problems.append(Problem(path, f"{path} must differ from those of other tools, got {name!r}."))
        names.add(name)
    named = request.named_function
    if named is not None and named not in names:
        path = "tool_choice.function.name"
        problems.append(Problem(path, f"{path} must be the name of one of the tools, got {shorten(named)}."))
    return problems


def _form_conflicts(request: ChatCompletionRequest) -> list[Problem]:
    """A call's form is its function's; an answer has only one."""
    if not request.must_call:
        return []
    given = ["structured_outputs"] if request.structured_outputs is not None else []
    if request.response_format is not None and request.response_format.constrains:
        given.append("response_format")
    sentence = 'cannot be combined with a tool_choice that demands a call; "none" leaves it its effect.'
    return [Problem(name, f"{name} {sentence}") for name in given]


def _oversized_chat(values: Mapping[str, Any]) -> list[Problem]:
    messages = values.get("messages")
    if isinstance(messages, list) and (number := _num_pieces(messages)) > MAX_MESSAGES:
        sentence = (
            f"messages must hold at most {MAX_MESSAGES} messages, parts of them and tool calls in all, "
            f"got {number}."
        )
        return [Problem("messages", sentence)]
    tools = values.get("tools")
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        return [Problem("tools", f"tools must hold at most {MAX_TOOLS} tools, got {len(tools)}.")]
    return []


def _num_pieces(messages: list[Any]) -> int:
    """Messages, parts and tool calls: what becomes an object each."""
    return len(messages) + sum(
        len(pieces)
        for message in messages
        if isinstance(message, dict)
        for pieces in (message.get("content"), message.get("tool_calls"))
        if isinstance(pieces, list)
    )


def _too_many_prompts(values: Mapping[str, Any]) -> list[Problem]:
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and isinstance(prompt[0], str | list):
        sentence = f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}."
        return [Problem("prompt", sentence)]
    return []


def _completion_conflicts(request: CompletionRequest) -> list[Problem]:
    problems = _shared_conflicts(request)
    if not request.prompt and not isinstance(request.prompt, str):
        problems.append(Problem("prompt", "prompt must not be an empty list."))
    if request.num_sequences > MAX_COMPLETIONS:
        sentence = f"n times the prompts must be at most {MAX_COMPLETIONS}, got {request.num_sequences}."
        problems.append(Problem("n", sentence))
    problems += _echo_conflicts(request)
    problems += _beam_logprobs_conflicts(request, "logprobs", request.logprobs)
    if request.best_of is not None and request.best_of != (request.n or 1):
        sentence = f"best_of must be null or equal to n ({request.n or 1}), got {request.best_of}."
        problems.append(Problem("best_of", sentence))
    return problems


def _echo_conflicts(request: CompletionRequest) -> list[Problem]:
    if request.max_tokens == 0 and not request.echo:
        return [Problem("max_tokens", "max_tokens must be at least 1 unless echo is true, got 0.")]
    if request.echo and request.logprobs is not None:
        if request.use_beam_search:
            return [Problem("echo", "echo with logprobs cannot be combined with use_beam_search.")]
        if request.stream and (request.n or 1) > 1:
            return [Problem("echo", f"echo with logprobs needs n = 1 in a stream, got {request.n}.")]
    return []


CHAT_READER = RequestReader(
    kind=ChatCompletionRequest,
    ranges=_SHARED
    | {
        "max_completion_tokens": _renamed("max_tokens", to="max_completion_tokens"),
        "top_logprobs": _renamed("logprobs", to="top_logprobs"),
    },
    refusals=CHAT_REFUSALS,
    shapes=_SHAPES
    | {
        "messages": {"minItems": 1},
        "tools": {"minItems": 1, "maxItems": MAX_TOOLS},
    },
    oversized=_oversized_chat,
    conflicts=_chat_conflicts,
)

COMPLETION_READER = RequestReader(
    kind=CompletionRequest,
    ranges=_SHARED
    | {
        "logprobs": _integer_from(0, "logprobs", "an integer >= 0"),
        "max_tokens": _integer_from(0, "max_tokens", "an integer >= 1, or 0 with echo"),
    },
    refusals=COMPLETION_REFUSALS,
    shapes=_SHAPES | {"prompt": {"minItems": 1}},
    oversized=_too_many_prompts,
    conflicts=_completion_conflicts,
)
