"""The items of an answer while they come: each tells its own events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

from trioserve.server.protocol.responses_events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from trioserve.server.protocol.responses_items import (
    FunctionCallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.server.protocol.chat import ChatTokenLogprob
    from trioserve.server.protocol.responses_items import ItemStatus, OutputItem

__all__ = ["OpenCall", "OpenItem", "OpenMessage", "OpenReasoning"]

Emit = Any
"""Called with an event's class and its fields, but for the sequence number."""


class OpenItem(Protocol):
    """An item of the response's output that has not ended."""

    def settle(self) -> None:
        """Bring the item in the output up to date: its text is kept in pieces meanwhile."""

    def close(self, status: ItemStatus) -> None:
        """Tell that nothing more comes."""


@attrs.define(eq=False)
class OpenMessage:
    item: MessageItem
    _index: int
    _emit: Emit
    _pieces: list[str] = attrs.field(init=False, factory=list)
    _part: OutputText = attrs.field(init=False, factory=lambda: OutputText(""))

    @classmethod
    def begin(cls, item_id: str, output: list[OutputItem], emit: Callable[..., None]) -> OpenMessage:
        opened = cls(MessageItem(id=item_id, content=[], status="in_progress"), len(output), emit)
        output.append(opened.item)
        emit(ItemAdded, output_index=opened._index, item=opened.item)
        opened.item.content.append(opened._part)
        emit(PartAdded, item_id=item_id, output_index=opened._index, part=opened._part)
        return opened

    def add(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> None:
        """`text` may be empty where there are logprobs of tokens without one."""
        self._pieces.append(text)
        self._part.logprobs += logprobs
        self._emit(
            TextDelta,
            item_id=self.item.id,
            output_index=self._index,
            delta=text,
            logprobs=list(logprobs),
        )

    def settle(self) -> None:
        self._part.text = "".join(self._pieces)

    def close(self, status: ItemStatus) -> None:
        self.settle()
        self.item.status = status
        where = {"item_id": self.item.id, "output_index": self._index}
        self._emit(TextDone, **where, text=self._part.text, logprobs=self._part.logprobs)
        self._emit(PartDone, **where, part=self._part)
        self._emit(ItemDone, output_index=self._index, item=self.item)


@attrs.define(eq=False)
class OpenReasoning:
    item: ReasoningItem
    _index: int
    _emit: Emit
    _pieces: list[str] = attrs.field(init=False, factory=list)
    _part: ReasoningText = attrs.field(init=False, factory=lambda: ReasoningText(""))

    @classmethod
    def begin(cls, item_id: str, output: list[OutputItem], emit: Callable[..., None]) -> OpenReasoning:
        opened = cls(ReasoningItem(id=item_id, content=[], status="in_progress"), len(output), emit)
        output.append(opened.item)
        emit(ItemAdded, output_index=opened._index, item=opened.item)
        opened.item.content.append(opened._part)
        emit(PartAdded, item_id=item_id, output_index=opened._index, part=opened._part)
        return opened

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._emit(ReasoningDelta, item_id=self.item.id, output_index=self._index, delta=text)

    def settle(self) -> None:
        self._part.text = "".join(self._pieces)

    def close(self, status: ItemStatus) -> None:
        self.settle()
        self.item.status = status
        where = {"item_id": self.item.id, "output_index": self._index}
        self._emit(ReasoningDone, **where, text=self._part.text)
        self._emit(PartDone, **where, part=self._part)
        self._emit(ItemDone, output_index=self._index, item=self.item)


@attrs.define(eq=False)
class OpenCall:
    item: FunctionCallItem
    _index: int
    _emit: Emit
    _pieces: list[str] = attrs.field(init=False, factory=list)

    @classmethod
    def begin(
        cls, item_id: str, call_id: str, name: str, output: list[OutputItem], emit: Callable[..., None]
    ) -> OpenCall:
        item = FunctionCallItem(id=item_id, call_id=call_id, name=name, arguments="", status="in_progress")
        opened = cls(item, len(output), emit)
        output.append(item)
        emit(ItemAdded, output_index=opened._index, item=item)
        return opened

    def add(self, arguments: str) -> None:
        self._pieces.append(arguments)
        self._emit(ArgumentsDelta, item_id=self.item.id, output_index=self._index, delta=arguments)

    def settle(self) -> None:
        self.item.arguments = "".join(self._pieces)

    def close(self, status: ItemStatus) -> None:
        self.settle()
        self.item.status = status
        self._emit(
            ArgumentsDone,
            item_id=self.item.id,
            output_index=self._index,
            name=self.item.name,
            arguments=self.item.arguments,
        )
        self._emit(ItemDone, output_index=self._index, item=self.item)
