"""The messages of a chat request, and the form in which chat templates take them."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import msgspec

from trioserve.errors import InvalidRequestError

__all__ = ["ChatMessage", "ContentPart", "FunctionCall", "ToolCall"]


_TEXT_FIELDS = {"refusal": "refusal", "thinking": "thinking"}
"""Type of a part -> the field with its text, where that is not `text`."""


@attrs.frozen(kw_only=True)
class ContentPart:
    """A part of a message's content; only text is served."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking"]
    text: str | None = None
    refusal: str | None = None
    """The text of the type of that name."""
    thinking: str | None = None
    """The same."""

    def __attrs_post_init__(self) -> None:
        if getattr(self, self._text_field) is None:
            name = self._text_field
            raise InvalidRequestError(f"A content part of type {self.type!r} needs a {name}.", parameter=name)

    @property
    def _text_field(self) -> str:
        return _TEXT_FIELDS.get(self.type, "text")

    @property
    def words(self) -> str:
        """Its text, in whichever field it is."""
        return getattr(self, self._text_field) or ""


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


_MAY_BE_EMPTY = frozenset({"assistant", "function"})
"""Roles of messages that need no content."""


@attrs.frozen(kw_only=True)
class ChatMessage:
    role: str
    """Any; which ones make sense is up to the model's chat template."""
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    """OpenAI's older way of telling a call; its result comes in a message of role "function"."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another spelling of `reasoning_content`."""
    refusal: str | None = None
    """What an earlier answer said instead of a content."""

    def __attrs_post_init__(self) -> None:
        if self.content is None and self.role not in _MAY_BE_EMPTY:
            raise InvalidRequestError(
                f"A message of role {self.role!r} needs a content.", parameter="content"
            )

    def text(self) -> str | None:
        """The content as one text: parts are joined by line breaks, and those of thinking left out."""
        if self.content is None or isinstance(self.content, str):
            return self.refusal if self.content is None else self.content
        return "\n".join(part.words for part in self.content if part.type != "thinking")

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it. Keys that were not given are left out, but for the content: many
        templates put it between other texts without a look, also that of a message of tool calls."""
        calls = self.tool_calls or ([ToolCall(function=self.function_call)] if self.function_call else [])
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in calls] or None,
            "reasoning_content": self._thoughts(),
        }
        given = {key: value for key, value in optional.items() if value is not None}
        role = "tool" if self.role == "function" else self.role
        return {"role": role, "content": self.text() or "", **given}

    def _thoughts(self) -> str | None:
        if given := self.reasoning_content or self.reasoning:
            return given
        parts = self.content if isinstance(self.content, list) else ()
        return "\n".join(part.words for part in parts if part.type == "thinking") or None
