"""What is wrong between the fields of a chat request that are about tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.server.protocol.lists import shorten
from trioserve.server.protocol.reading import Problem
from trioserve.server.protocol.tools import AllowedToolsChoice, NamedFunction, NamedToolChoice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.server.protocol.chat_fields import ChatFields
    from trioserve.server.protocol.tools import FunctionDefinition

__all__ = ["tool_conflicts"]


def tool_conflicts(request: ChatFields) -> list[Problem]:
    return [*_missing_tools(request), *_wrong_names(request), *_several_forms(request)]


def _missing_tools(request: ChatFields) -> Iterator[Problem]:
    if request.tools is None and request.tool_choice not in (None, "none"):
        yield Problem("tool_choice", "tool_choice is only allowed when tools are given.")
    if request.tools is not None and not request.tools:
        yield Problem("tools", "tools must hold at least one tool, got [].")
    if not request.functions and request.function_call not in (None, "none"):
        yield Problem("function_call", "function_call is only allowed when functions are given.")
    if request.functions and request.tools:
        yield Problem("functions", "functions must not be given beside tools: they are the same.")


def _wrong_names(request: ChatFields) -> Iterator[Problem]:
    tools = [tool.function for tool in request.tools or ()]
    yield from _repeated_names(tools, "tools[{}].function.name")
    yield from _repeated_names(request.functions or (), "functions[{}].name")
    if request.functions and isinstance(request.function_call, NamedFunction):
        yield from _unknown_name(request.function_call, request.functions, "function_call", "functions")
    choice = request.tool_choice
    if tools and isinstance(choice, NamedToolChoice):
        yield from _unknown_name(choice.function, tools, "tool_choice.function", "tools")
    if tools and isinstance(choice, AllowedToolsChoice):
        for index, tool in enumerate(choice.allowed_tools.tools):
            path = f"tool_choice.allowed_tools.tools[{index}].function"
            yield from _unknown_name(tool.function, tools, path, "tools")


def _repeated_names(functions: Sequence[FunctionDefinition], path: str) -> Iterator[Problem]:
    names: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in names:
            where = path.format(index)
            kind = path.partition("[")[0]
            sentence = f"{where} must differ from those of other {kind}, got {function.name!r}."
            yield Problem(where, sentence)
        names.add(function.name)


def _unknown_name(
    chosen: NamedFunction, known: Sequence[FunctionDefinition], path: str, kind: str
) -> Iterator[Problem]:
    if not any(function.name == chosen.name for function in known):
        sentence = f"{path}.name must be the name of one of the {kind}, got {shorten(chosen.name)}."
        yield Problem(f"{path}.name", sentence)


def _several_forms(request: ChatFields) -> Iterator[Problem]:
    """A call's form is its function's; an answer has only one."""
    if not request.simplified().must_call:
        return
    choice = "function_call" if request.functions else "tool_choice"
    if request.structured_outputs is not None:
        yield _second_form("structured_outputs", choice)
    if request.response_format is not None and request.response_format.constrains:
        yield _second_form("response_format", choice)
    if request.echo:
        yield _second_form("echo", choice)


def _second_form(name: str, choice: str) -> Problem:
    sentence = f'cannot be combined with a {choice} that demands a call; "none" leaves it its effect.'
    return Problem(name, f"{name} {sentence}")
