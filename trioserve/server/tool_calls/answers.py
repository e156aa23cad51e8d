"""Tool calls as an answer tells them: whole, or in deltas."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from trioserve.server.protocol.tools import CalledFunction, FunctionDelta, MessageToolCall, ToolCallDelta

if TYPE_CHECKING:
    from trioserve.server.tool_calls.scanner import CallPart, CallScanner

__all__ = ["call_delta", "whole_calls"]


def whole_calls(scanner: CallScanner, text: str) -> list[MessageToolCall]:
    """The calls of a whole answer. What was cut off before its name is none."""
    calls: list[MessageToolCall] = []
    for part in scanner.feed(text):
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
