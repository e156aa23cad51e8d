"""The readers of the two APIs: which ranges, refusals and conflicts hold for their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.beam_search_params import BeamSearchParams
from trioserve.sampling_params import SamplingParams
from trioserve.server.protocol.chat import ChatBatchRequest, ChatCompletionRequest
from trioserve.server.protocol.completions import CompletionRequest
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS
from trioserve.server.protocol.template_conflicts import template_conflicts
from trioserve.server.protocol.tool_conflicts import tool_conflicts
from trioserve.validators import integer, number, optional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.server.protocol.chat_fields import ChatFields
    from trioserve.server.protocol.sampling import SamplingFields

__all__ = [
    "CHAT_BATCH_READER",
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
        "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words",
    )
}  # fmt: skip

_NOT_IN_BEAM_SEARCH = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids",
    "min_tokens", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words",
    "repetition_detection", "thinking_token_budget",
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
    "truncate_prompt_tokens": _PARAMS["max_tokens"].evolve(
        name="truncate_prompt_tokens",
        validator=optional(integer("an integer >= 1, or -1 for what leaves room", least=-1)),
    ),
    "thinking_token_budget": _integer_from(
        -1, "thinking_token_budget", "an integer >= 0, or -1 for no limit"
    ),
}


def _shared_conflicts(request: SamplingFields) -> list[Problem]:
    problems = []
    if request.stream_options is not None and not request.stream:
        problems.append(Problem("stream_options", "stream_options is only allowed when stream is true."))
    if request.truncate_prompt_tokens == 0:
        sentence = "truncate_prompt_tokens = 0 would leave nothing of the prompt."
        problems.append(Problem("truncate_prompt_tokens", sentence))
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
    problems = [] if request.messages else [_no_messages("messages")]
    return problems + _chat_field_conflicts(request)


def _no_messages(path: str) -> Problem:
    return Problem(path, f"{path} must hold at least one message, got [].")


def _chat_field_conflicts(request: ChatFields) -> list[Problem]:
    problems = _shared_conflicts(request)
    if request.top_logprobs and not request.logprobs:
        problems.append(Problem("top_logprobs", "top_logprobs is only allowed when logprobs is true."))
    problems += template_conflicts(request)
    if request.use_beam_search and request.token_limit is None:
        sentence = "max_completion_tokens must be given with use_beam_search."
        problems.append(Problem("max_completion_tokens", sentence))
    if request.logprob_token_ids and not request.logprobs:
        problems.append(_needless_token_ids("logprobs is true"))
    problems += _beam_logprobs_conflicts(request, "top_logprobs", request.num_top_logprobs)
    return problems + tool_conflicts(request)


_NOT_IN_BATCH = ("stream", "tools", "functions", "use_beam_search", "prompt_logprobs", "return_prompt_text")


def _batch_conflicts(request: ChatBatchRequest) -> list[Problem]:
    problems = [] if request.messages else [Problem("messages", "messages must hold at least one chat.")]
    problems += [
        _no_messages(f"messages[{index}]") for index, chat in enumerate(request.messages) if not chat
    ]
    problems += [
        Problem(name, f"{name} must be null or false in a batch: nothing tells whose it would be.")
        for name in _NOT_IN_BATCH
        if (value := getattr(request, name)) is not None and value is not False  # 0 is neither
    ]
    return problems or _chat_field_conflicts(request)


def _needless_token_ids(condition: str) -> Problem:
    sentence = f"logprob_token_ids is only allowed when {condition}."
    return Problem("logprob_token_ids", sentence)


def _oversized_batch(values: Mapping[str, Any]) -> list[Problem]:
    chats = values.get("messages")
    if not isinstance(chats, list):
        return []
    if len(chats) > MAX_PROMPTS:
        sentence = f"messages must hold at most {MAX_PROMPTS} chats, got {len(chats)}."
        return [Problem("messages", sentence)]
    messages = [message for chat in chats if isinstance(chat, list) for message in chat]
    return _oversized_chat({**values, "messages": messages})


def _oversized_chat(values: Mapping[str, Any]) -> list[Problem]:
    messages = values.get("messages")
    if isinstance(messages, list) and (number := _num_pieces(messages)) > MAX_MESSAGES:
        sentence = (
            f"messages must hold at most {MAX_MESSAGES} messages, parts of them and tool calls in all, "
            f"got {number}."
        )
        return [Problem("messages", sentence)]
    for name in ("tools", "functions"):
        tools = values.get(name)
        if isinstance(tools, list) and len(tools) > MAX_TOOLS:
            return [Problem(name, f"{name} must hold at most {MAX_TOOLS} tools, got {len(tools)}.")]
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
    problems += [*_echo_conflicts(request), *_best_of_conflicts(request), *_suffix_conflicts(request)]
    if request.logprob_token_ids and request.logprobs is None:
        problems.append(_needless_token_ids("logprobs is given"))
    return problems + _beam_logprobs_conflicts(request, "logprobs", request.logprobs)


def _best_of_conflicts(request: CompletionRequest) -> list[Problem]:
    best_of, shown = request.best_of, request.n or 1
    if best_of is None or best_of == shown:
        return []
    if best_of < shown:
        return [Problem("best_of", f"best_of must be at least n ({shown}), got {best_of}.")]
    reason = "stream" if request.stream else "use_beam_search" if request.use_beam_search else None
    return [] if reason is None else [Problem("best_of", f"best_of must be null or n with {reason}.")]


def _suffix_conflicts(request: CompletionRequest) -> list[Problem]:
    if not request.suffix:
        return []
    problems = []
    if not all(isinstance(prompt, str) for prompt in request.prompts):
        sentence = "suffix must be null or empty where the prompt is token ids: put it among these."
        problems.append(Problem("suffix", sentence))
    given = [name for name in ("echo", "truncate_prompt_tokens") if getattr(request, name)]
    return problems + [Problem(name, f"{name} cannot be combined with suffix.") for name in given]


def _echo_conflicts(request: CompletionRequest) -> list[Problem]:
    if request.max_tokens == 0 and not request.echo:
        return [Problem("max_tokens", "max_tokens must be at least 1 unless echo is true, got 0.")]
    if request.echo and request.logprobs is not None:
        if request.use_beam_search:
            return [Problem("echo", "echo with logprobs cannot be combined with use_beam_search.")]
        if request.stream and (request.n or 1) > 1:
            return [Problem("echo", f"echo with logprobs needs n = 1 in a stream, got {request.n}.")]
    return []


_CHAT_RANGES = _SHARED | {
    "max_completion_tokens": _renamed("max_tokens", to="max_completion_tokens"),
    "top_logprobs": _renamed("logprobs", to="top_logprobs"),
}

CHAT_READER = RequestReader(
    kind=ChatCompletionRequest,
    ranges=_CHAT_RANGES,
    refusals=CHAT_REFUSALS,
    shapes=_SHAPES
    | {
        "messages": {"minItems": 1},
        "tools": {"minItems": 1, "maxItems": MAX_TOOLS},
        "functions": {"maxItems": MAX_TOOLS},
    },
    oversized=_oversized_chat,
    conflicts=_chat_conflicts,
)

CHAT_BATCH_READER = RequestReader(
    kind=ChatBatchRequest,
    ranges=_CHAT_RANGES | {"n": _renamed("n", to="n").evolve(validator=integer("1 in a batch", 1, 1))},
    refusals=CHAT_REFUSALS,
    shapes=_SHAPES
    | {"messages": {"minItems": 1, "maxItems": MAX_PROMPTS}}
    | {name: {"enum": [None, False]} for name in _NOT_IN_BATCH},
    oversized=_oversized_batch,
    conflicts=_batch_conflicts,
)

COMPLETION_READER = RequestReader(
    kind=CompletionRequest,
    ranges=_SHARED
    | {
        "logprobs": _integer_from(0, "logprobs", "an integer >= 0"),
        "max_tokens": _integer_from(0, "max_tokens", "an integer >= 1, or 0 with echo"),
        "best_of": _renamed("n", to="best_of"),
    },
    refusals=COMPLETION_REFUSALS,
    shapes=_SHAPES | {"prompt": {"minItems": 1}},
    oversized=_too_many_prompts,
    conflicts=_completion_conflicts,
)
