"""The readers of the two APIs: which ranges, refusals and conflicts hold for their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.sampling_params import SamplingParams
from trioserve.server.protocol.chat import ChatCompletionRequest
from trioserve.server.protocol.completions import CompletionRequest
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS

if TYPE_CHECKING:
    from trioserve.server.protocol.sampling import SamplingFields

__all__ = ["CHAT_READER", "COMPLETION_READER", "MAX_PROMPTS"]

MAX_PROMPTS = 2048
"""Prompts of one completions request; each is a request of the engine."""

_PARAMS = attrs.fields_dict(SamplingParams)

_SHARED = {
    name: _PARAMS[name]
    for name in (
        "n", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "min_tokens", "max_tokens",
    )
}  # fmt: skip


def _renamed(name: str, *, to: str) -> attrs.Attribute[Any]:
    return _PARAMS[name].evolve(name=to)


def _shared_conflicts(request: SamplingFields) -> list[Problem]:
    problems = []
    if request.stream_options is not None and not request.stream:
        problems.append(Problem("stream_options", "stream_options is only allowed when stream is true."))
    if request.cache_salt is not None and not request.cache_salt:
        problems.append(Problem("cache_salt", "cache_salt must be a non-empty string, got ''."))
    return problems


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
    return problems + _tool_conflicts(request)


def _tool_conflicts(request: ChatCompletionRequest) -> list[Problem]:
    chooses = request.tool_choice is not None and request.tool_choice != "none"
    if request.tools is None and chooses:
        return [Problem("tool_choice", "tool_choice is only allowed when tools are given.")]
    if request.tools == []:
        return [Problem("tools", "tools must hold at least one tool, got [].")]
    if request.tools and request.tool_choice != "none":
        sentence = 'tools are only supported with tool_choice "none": tool calls are not parsed.'
        return [Problem("tools", sentence)]
    return []


def _completion_conflicts(request: CompletionRequest) -> list[Problem]:
    problems = _shared_conflicts(request)
    if not request.prompt and not isinstance(request.prompt, str):
        problems.append(Problem("prompt", "prompt must not be an empty list."))
    if len(request.prompts) > MAX_PROMPTS:
        sentence = f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(request.prompts)}."
        problems.append(Problem("prompt", sentence))
    if request.echo and request.logprobs is not None:
        problems.append(Problem("echo", "echo cannot be combined with logprobs."))
    if request.best_of is not None and request.best_of != (request.n or 1):
        sentence = f"best_of must be null or equal to n ({request.n or 1}), got {request.best_of}."
        problems.append(Problem("best_of", sentence))
    return problems


CHAT_READER = RequestReader(
    kind=ChatCompletionRequest,
    ranges=_SHARED
    | {
        "max_completion_tokens": _renamed("max_tokens", to="max_completion_tokens"),
        "top_logprobs": _renamed("logprobs", to="top_logprobs"),
    },
    refusals=CHAT_REFUSALS,
    conflicts=_chat_conflicts,
)

COMPLETION_READER = RequestReader(
    kind=CompletionRequest,
    ranges=_SHARED | {"logprobs": _PARAMS["logprobs"]},
    refusals=COMPLETION_REFUSALS,
    conflicts=_completion_conflicts,
)
