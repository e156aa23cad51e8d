"""Tool calls as an answer tells them: whole, or in deltas."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from trioserve.server.protocol.tools import CalledFunction, FunctionDelta, MessageToolCall, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioserve.parsers.parts import CallPart

__all__ = ["call_delta", "whole_calls"]


def whole_calls(parts: Iterable[CallPart]) -> list[MessageToolCall]:
    """The calls of a whole answer."""
    calls: list[MessageToolCall] = []
    for part in parts:
        if part.name is not None:
            calls.append(MessageToolCall(_new_id(), CalledFunction(part.name, "")))
        calls[part.index].function.arguments += part.arguments
    return calls


def call_delta(part: CallPart) -> ToolCallDelta:
    if part.name is None:
        return ToolCallDelta(part.index, FunctionDelta(part.arguments))
    return ToolCallDelta(part.index, FunctionDelta(part.arguments, part.name), _new_id(), "function")


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
