"""Items of the Responses API: what a request's input is made of, and what answers and lists show.

As in OpenAI's description (InputItem, OutputItem, ItemResource), as far as texts and function calls go.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
from msgspec import UNSET, UnsetType

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.chat import ChatTokenLogprob

__all__ = [
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "InputItem",
    "InputMessageItem",
    "InputPart",
    "InputText",
    "ItemResource",
    "ItemStatus",
    "MessageItem",
    "OutputItem",
    "OutputPart",
    "OutputText",
    "ReasoningItem",
    "ReasoningText",
    "Refusal",
    "SummaryText",
]

ItemStatus = Literal["in_progress", "completed", "incomplete"]


# What is read


@attrs.frozen(kw_only=True)
class InputPart:
    """A part of a content; only text is served."""

    type: Literal["input_text", "output_text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None

    def __attrs_post_init__(self) -> None:
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise InvalidRequestError(f"A part of type {self.type!r} needs a {name}.", parameter=name)

    @property
    def words(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
"""Type of an item -> the fields that it cannot do without."""


@attrs.frozen(kw_only=True)
class InputItem:
    """One item of `input`; which fields matter depends on its type."""

    type: (
        Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None
    ) = None
    """None: a message, or a reference if there is nothing but an id."""
    id: str | None = None
    status: ItemStatus | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    """Of a message, and of reasoning."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """JSON of an object, or whatever the model wrote in its place."""
    output: str | list[InputPart] | None = None
    """Of a function that was called."""
    summary: list[InputPart] | None = None

    def __attrs_post_init__(self) -> None:
        for name in _NEEDS[self.kind]:
            if getattr(self, name) is None:
                raise InvalidRequestError(f"An item of type {self.kind!r} needs a {name}.", parameter=name)

    @property
    def kind(self) -> str:
        if self.type is not None:
            return self.type
        return "item_reference" if self.id is not None and self.role is None else "message"

    @property
    def text(self) -> str:
        """Of a message, of reasoning or of what a function gave: parts are joined by line breaks."""
        given = self.output if self.kind == "function_call_output" else self.content
        if isinstance(given, str):
            return given
        return "\n".join(part.words for part in given or self.summary or ())


# What is written


@attrs.define
class InputText:
    text: str
    type: str = "input_text"


@attrs.define
class OutputText:
    text: str
    annotations: list[Any] = attrs.Factory(list)
    logprobs: list[ChatTokenLogprob] = attrs.Factory(list)
    type: str = "output_text"


@attrs.define
class Refusal:
    refusal: str
    type: str = "refusal"


@attrs.define
class ReasoningText:
    text: str
    type: str = "reasoning_text"


@attrs.define
class SummaryText:
    text: str
    type: str = "summary_text"


OutputPart = OutputText | ReasoningText
"""What `response.content_part` events tell of."""


@attrs.define(kw_only=True)
class InputMessageItem:
    id: str
    role: str
    content: list[InputText]
    status: str = "completed"
    type: str = "message"


@attrs.define(kw_only=True)
class MessageItem:
    """What the model said."""

    id: str
    content: list[OutputText | Refusal]
    status: str
    role: str = "assistant"
    type: str = "message"


@attrs.define(kw_only=True)
class ReasoningItem:
    id: str
    summary: list[SummaryText] = attrs.Factory(list)
    """Empty in answers: the text itself is in `content`."""
    content: list[ReasoningText]
    encrypted_content: None = None
    """Nothing is hidden, so nothing is encrypted."""
    status: str
    type: str = "reasoning"


@attrs.define(kw_only=True)
class FunctionCallItem:
    id: str
    call_id: str
    """By which the function's output refers to it."""
    name: str
    arguments: str
    """JSON, exactly as generated; its beginning, if the answer was cut off."""
    status: str
    type: str = "function_call"


@attrs.define(kw_only=True)
class FunctionCallOutputItem:
    id: str
    call_id: str
    output: str | list[InputText]
    name: str | UnsetType = UNSET
    status: str = "completed"
    type: str = "function_call_output"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem

ItemResource = InputMessageItem | MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem
"""What lists of input items hold."""
