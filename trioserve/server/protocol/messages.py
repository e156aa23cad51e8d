"""The messages of a chat request, and the form in which chat templates take them."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import msgspec

from trioserve.errors import InvalidRequestError

__all__ = ["ChatMessage", "ContentPart", "FunctionCall", "ToolCall"]


@attrs.frozen(kw_only=True)
class ContentPart:
    """A part of a message's content; only text is served."""

    type: Literal["text", "input_text"]
    text: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.text is None:
            raise InvalidRequestError("A content part needs a text.", parameter="text")


@attrs.frozen(kw_only=True)
class FunctionCall:
    name: str
    arguments: str | dict[str, Any] = "{}"
    """JSON of an object, as the model wrote it."""

    def for_template(self) -> dict[str, Any]:
        """Templates print `arguments` as JSON themselves, so they need the object."""
        return {"name": self.name, "arguments": _arguments_object(self.arguments)}

    def __attrs_post_init__(self) -> None:
        _arguments_object(self.arguments)


def _arguments_object(arguments: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        value = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequestError(
            f"A tool call's arguments must be JSON of an object, got {arguments[:80]!r}.",
            parameter="arguments",
        ) from None
    return value


@attrs.frozen(kw_only=True)
class ToolCall:
    """A call that an earlier answer of the model made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.for_template()}


@attrs.frozen(kw_only=True)
class ChatMessage:
    role: str
    """Any; which ones make sense is up to the model's chat template."""
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another spelling of `reasoning_content`."""

    def __attrs_post_init__(self) -> None:
        if self.content is None and self.role != "assistant":
            raise InvalidRequestError(
                f"A message of role {self.role!r} needs a content.", parameter="content"
            )

    def text(self) -> str | None:
        """The content as one text: parts are joined by line breaks."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text or "" for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it. Keys that were not given are left out, but for the content: many
        templates put it between other texts without a look, also that of a message of tool calls."""
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return {"role": self.role, "content": self.text() or "", **given}
