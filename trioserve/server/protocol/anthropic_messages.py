"""The messages of Anthropic's API, as a request has them.

Field by field as in https://docs.anthropic.com/en/api/messages; only text is served.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trioserve.errors import InvalidRequestError

__all__ = ["InputBlock", "InputMessage", "InputTextBlock", "join_texts"]

_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""Type of a block -> the fields that it must have."""

_ROLES = {
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_result": "user",
}
"""Type of a block -> the role in whose messages alone it makes sense."""


@attrs.frozen(kw_only=True)
class InputTextBlock:
    """A block where nothing but text may be."""

    type: Literal["text"]
    text: str


@attrs.frozen(kw_only=True)
class InputBlock:
    """A block of a message's content. Each type has fields of its own."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    """Of a call (`tool_use`), which its result refers to as `tool_use_id`."""
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputTextBlock] | None = None
    """What a tool gave back."""
    is_error: bool | None = None

    def __attrs_post_init__(self) -> None:
        for field in _NEEDED[self.type]:
            if getattr(self, field) is None:
                raise InvalidRequestError(f"A block of type {self.type!r} needs it.", parameter=field)

    def result_text(self) -> str:
        """Of a tool's result; that it is an error is said in words, as chat templates know nothing of it."""
        text = join_texts(self.content or "")
        if not self.is_error:
            return text
        return f"Error: {text}" if text else "Error"


@attrs.frozen(kw_only=True)
class InputMessage:
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]

    def __attrs_post_init__(self) -> None:
        if self.role != "assistant" and not self.content:
            raise InvalidRequestError(
                f"A message of role {self.role!r} must not be empty.", parameter="content"
            )
        for index, block in enumerate(self.content):
            if isinstance(block, InputBlock) and _ROLES.get(block.type, self.role) != self.role:
                raise InvalidRequestError(
                    f"A block of type {block.type!r} belongs in a message of role {_ROLES[block.type]!r}, "
                    f"got {self.role!r}.",
                    parameter=f"content[{index}].type",
                )

    def blocks(self) -> list[InputBlock]:
        if isinstance(self.content, str):
            return [InputBlock(type="text", text=self.content)]
        return self.content


def join_texts(content: str | list[InputTextBlock]) -> str:
    """One text of several: they are joined by line breaks."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)
