"""The readers of Anthropic's API: which ranges, refusals and conflicts hold for its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.sampling_params import SamplingParams
from trioserve.server.protocol.anthropic import ConversationRequest, MessagesRequest
from trioserve.server.protocol.lists import shorten
from trioserve.server.protocol.readers import MAX_MESSAGES, MAX_TOOLS
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.refusals import Refusal
from trioserve.server.protocol.template_conflicts import taken_template_names
from trioserve.validators import integer, number, optional

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COUNT_TOKENS_READER", "MESSAGES_READER"]

_PARAMS = attrs.fields_dict(SamplingParams)

_TIMEOUT = _PARAMS["temperature"].evolve(
    name="timeout", validator=optional(number("a number of seconds > 0", above=0))
)

_RANGES = {name: _PARAMS[name] for name in ("temperature", "top_p", "top_k")} | {
    "max_tokens": _PARAMS["max_tokens"].evolve(validator=integer("an integer >= 1", least=1)),
    "stop_sequences": _PARAMS["stop"].evolve(name="stop_sequences"),
    "timeout": _TIMEOUT,
}

_REFUSALS = (
    Refusal("container", "null"),
    Refusal("context_management", "null"),
    Refusal("mcp_servers", "null or empty", ([],)),
    Refusal("speed", 'null or "standard"', ("standard",)),
    Refusal("kv_transfer_params", "null or empty", ({},)),
)

_SHAPES = {
    "messages": {"minItems": 1},
    "tools": {"maxItems": MAX_TOOLS},
    "cache_salt": {"minLength": 1},
}


def _oversized(values: Mapping[str, Any]) -> list[Problem]:
    problems = []
    pieces = [values.get("messages"), values.get("system")]
    if (count := sum(map(_num_pieces, pieces))) > MAX_MESSAGES:
        sentence = (
            f"messages must hold at most {MAX_MESSAGES} messages and blocks of them in all, got {count}."
        )
        problems.append(Problem("messages", sentence))
    tools = values.get("tools")
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        problems.append(Problem("tools", f"tools must hold at most {MAX_TOOLS} tools, got {len(tools)}."))
    return problems


def _num_pieces(value: Any) -> int:
    """Messages, their blocks, and what a tool's result is made of: what becomes an object each."""
    if not isinstance(value, list):
        return 0
    return len(value) + sum(_num_pieces(item.get("content")) for item in value if isinstance(item, dict))


def _conflicts(request: ConversationRequest) -> list[Problem]:
    problems = []
    if not request.messages:
        problems.append(Problem("messages", "messages must hold at least one message, got []."))
    problems += taken_template_names(request.chat_template_kwargs)
    if request.must_call and request.output_format is not None:
        sentence = "output_config.format cannot be combined with a tool_choice that demands a call."
        problems.append(Problem("output_config.format", sentence))
    return problems + _tool_conflicts(request)


def _tool_conflicts(request: ConversationRequest) -> list[Problem]:
    problems = []
    names: set[str] = set()
    for index, tool in enumerate(request.tools or ()):
        if tool.name in names:
            path = f"tools[{index}].name"
            problems.append(
                Problem(path, f"{path} must differ from those of other tools, got {tool.name!r}.")
            )
        names.add(tool.name)
    choice = request.tool_choice
    if request.must_call and not names:
        problems.append(Problem("tool_choice", "tool_choice demands a call, and no tools are given."))
    elif choice is not None and choice.type == "tool" and choice.name not in names:
        sentence = f"tool_choice.name must be the name of one of the tools, got {shorten(choice.name)}."
        problems.append(Problem("tool_choice.name", sentence))
    return problems


def _messages_conflicts(request: MessagesRequest) -> list[Problem]:
    problems = _conflicts(request)
    if request.cache_salt is not None and not request.cache_salt:
        problems.append(Problem("cache_salt", "cache_salt must be a non-empty string, got ''."))
    return problems


MESSAGES_READER = RequestReader(
    kind=MessagesRequest,
    ranges=_RANGES,
    refusals=_REFUSALS,
    shapes=_SHAPES,
    oversized=_oversized,
    conflicts=_messages_conflicts,
)

COUNT_TOKENS_READER = RequestReader(
    kind=ConversationRequest,
    ranges={"timeout": _TIMEOUT},
    refusals=_REFUSALS,
    shapes={name: _SHAPES[name] for name in ("messages", "tools")},
    oversized=_oversized,
    conflicts=_conflicts,
)
