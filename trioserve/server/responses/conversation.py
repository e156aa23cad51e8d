"""Between items and messages: what the chat template gets, and what is kept of an input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.messages import ChatMessage, FunctionCall, ToolCall
from trioserve.server.protocol.responses_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputMessageItem,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
)
from trioserve.server.responses.ids import input_item_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.server.protocol.responses_items import InputItem, ItemResource

__all__ = ["chat_messages", "stored_items"]


def chat_messages(items: Iterable[InputItem], instructions: str | None = None) -> list[ChatMessage]:
    """The items as messages. What the model thought, said and called in one go is one message, as in chats;
    a developer's message is a system message, which is what templates know."""
    conversation = _Conversation()
    if instructions is not None:
        conversation.messages.append(ChatMessage(role="system", content=instructions))
    for item in items:
        conversation.add(item)
    conversation.end_turn()
    return conversation.messages


@attrs.define(eq=False)
class _ModelTurn:
    """What the model gave, as far as it is known."""

    reasoning: str | None = None
    text: str | None = None
    calls: list[ToolCall] = attrs.field(factory=list)


@attrs.define(eq=False)
class _Conversation:
    messages: list[ChatMessage] = attrs.field(factory=list)
    _turn: _ModelTurn | None = None
    _names: dict[str, str] = attrs.field(factory=dict)  # of the functions that were called, by the call's id

    def add(self, item: InputItem) -> None:
        match item.kind:
            case "reasoning":
                self.end_turn()
                self._turn = _ModelTurn(reasoning=item.text or None)
            case "function_call":
                self._add_call(item)
            case "function_call_output":
                self.end_turn()
                self._add_output(item)
            case _ if item.role == "assistant":
                self._add_text(item.text)
            case _:
                self.end_turn()
                role = "system" if item.role == "developer" else item.role or "user"
                self.messages.append(ChatMessage(role=role, content=item.text))

    def end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None or (turn.text is None and not turn.calls):
            return  # thoughts that came to nothing
        self.messages.append(
            ChatMessage(
                role="assistant",
                content=turn.text,
                tool_calls=turn.calls or None,
                reasoning_content=turn.reasoning,
            )
        )

    def _add_text(self, text: str) -> None:
        if self._turn is None or self._turn.text is not None or self._turn.calls:
            self.end_turn()
            self._turn = _ModelTurn()
        self._turn.text = text

    def _add_call(self, item: InputItem) -> None:
        if self._turn is None:
            self._turn = _ModelTurn()
        function = _called(item)
        self._turn.calls.append(ToolCall(id=item.call_id, function=function))
        self._names[item.call_id or ""] = function.name

    def _add_output(self, item: InputItem) -> None:
        name = item.name or self._names.get(item.call_id or "")
        self.messages.append(
            ChatMessage(role="tool", content=item.text, tool_call_id=item.call_id, name=name)
        )


def _called(item: InputItem) -> FunctionCall:
    """Templates need an object. Where the model has written something else, the call has no arguments for
    them: it is there all the same, as is what its client said of it."""
    name = item.name or ""
    try:
        return FunctionCall(name=name, arguments=item.arguments or "{}")
    except InvalidRequestError:
        return FunctionCall(name=name)


def stored_items(items: Iterable[InputItem], response_id: str) -> list[ItemResource]:
    """What lists of the response's input show. One that has no id, or that of another one, gets one: lists
    are read on from an id."""
    stored: list[ItemResource] = []
    ids: set[str] = set()
    for index, item in enumerate(items):
        own = item.id if item.id and item.id not in ids else input_item_id(item.kind, response_id, index)
        ids.add(own)
        stored.append(_stored_item(item, own))
    return stored


def _stored_item(item: InputItem, item_id: str) -> ItemResource:
    status = item.status or "completed"
    match item.kind:
        case "reasoning":
            given = item.content if isinstance(item.content, list) else ()
            return ReasoningItem(
                id=item_id,
                summary=[SummaryText(part.words) for part in item.summary or ()],
                content=[ReasoningText(part.words) for part in given],
                status=status,
            )
        case "function_call":
            return FunctionCallItem(
                id=item_id,
                call_id=item.call_id or "",
                name=item.name or "",
                arguments=item.arguments or "",
                status=status,
            )
        case "function_call_output":
            output = item.output if isinstance(item.output, str) else _input_texts(item)
            return FunctionCallOutputItem(
                id=item_id, call_id=item.call_id or "", output=output, status=status
            )
        case _ if item.role == "assistant":
            return MessageItem(id=item_id, content=_output_texts(item), status=status)
        case _:
            content = [InputText(item.text)] if isinstance(item.content, str) else _input_texts(item)
            return InputMessageItem(id=item_id, role=item.role or "user", content=content, status=status)


def _input_texts(item: InputItem) -> list[InputText]:
    parts = item.output if item.kind == "function_call_output" else item.content
    return [InputText(part.words) for part in parts or () if not isinstance(part, str)]


def _output_texts(item: InputItem) -> list[OutputText | Refusal]:
    if not isinstance(item.content, list):
        return [OutputText(item.text)]
    parts: Sequence[OutputText | Refusal] = [
        Refusal(part.words) if part.type == "refusal" else OutputText(part.words) for part in item.content
    ]
    return list(parts)
