"""Function tools: what a request says about them, and the calls of an answer.

As in OpenAI's description of chat completions (ChatCompletionTool, ChatCompletionMessageToolCall,
ChatCompletionMessageToolCallChunk).
"""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs
from msgspec import UNSET, UnsetType

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.lists import shorten

__all__ = [
    "AllowedTools",
    "AllowedToolsChoice",
    "CalledFunction",
    "FunctionChoice",
    "FunctionDefinition",
    "FunctionDelta",
    "FunctionTool",
    "MessageToolCall",
    "NamedFunction",
    "NamedToolChoice",
    "ToolCallDelta",
    "ToolChoice",
]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@attrs.frozen(kw_only=True)
class FunctionDefinition:
    name: str
    """1 to 64 of a-z, A-Z, 0-9, _ and -."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, which are an object; without one there are no arguments."""
    strict: bool | None = None
    """True: a schema of which a part cannot be enforced is refused. Else that part is left to the model."""

    def __attrs_post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequestError(
                f"A function's name has 1 to 64 of a-z, A-Z, 0-9, _ and -, got {shorten(self.name)}.",
                parameter="name",
            )
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            raise InvalidRequestError(
                f'The schema of a function\'s arguments has the type "object", got {shorten(kind)}.',
                parameter="parameters.type",
            )


@attrs.frozen(kw_only=True)
class FunctionTool:
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it; keys that were not given are left out."""
        given = attrs.asdict(self.function, recurse=False, filter=lambda _, value: value is not None)
        return {"type": self.type, "function": given}


@attrs.frozen(kw_only=True)
class NamedFunction:
    name: str


@attrs.frozen(kw_only=True)
class NamedToolChoice:
    """This function is to be called."""

    type: Literal["function"]
    function: NamedFunction


@attrs.frozen(kw_only=True)
class AllowedTools:
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]
    """Of the request's tools, by name; what else a definition has is passed over."""

    def __attrs_post_init__(self) -> None:
        if not self.tools:
            raise InvalidRequestError("At least one tool must be allowed, got [].", parameter="tools")


@attrs.frozen(kw_only=True)
class AllowedToolsChoice:
    """As if these were the only tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice

FunctionChoice = Literal["none", "auto"] | NamedFunction
"""`function_call`, OpenAI's older way of choosing."""


@attrs.define
class CalledFunction:
    name: str
    arguments: str
    """JSON, exactly as generated; its beginning, if the answer was cut off."""


@attrs.define
class MessageToolCall:
    id: str
    function: CalledFunction
    type: str = "function"


@attrs.define
class FunctionDelta:
    arguments: str
    """What comes after the arguments so far."""
    name: str | UnsetType = UNSET


@attrs.define
class ToolCallDelta:
    """A call's first delta has id, type and name and no arguments yet; the others have arguments only."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
