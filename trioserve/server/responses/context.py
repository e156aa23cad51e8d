"""What a response goes on from: earlier responses, and items that the input refers to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec
import trio

from trioserve.server.protocol.readers import MAX_MESSAGES
from trioserve.server.protocol.responses_items import InputItem
from trioserve.server.responses.ids import response_of_item
from trioserve.server.responses.refusals import (
    conversation_too_long,
    item_given_twice,
    item_not_found,
    previous_not_found,
    still_in_progress,
)
from trioserve.server.responses.store import HistoryTooLongError, ResponseStore, UnknownResponseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.server.responses.store import StoredResponse

__all__ = ["MAX_CONTEXT_BYTES", "ContextReader"]

MAX_CONTEXT_BYTES = 64 * 2**20
"""Of the responses that one goes on from, as JSON, and of those that its references lead to: a request of a
few bytes must not cost the memory of all that was ever said."""

_LARGE = 2**18
"""Bytes of JSON that are read in a thread, while others go on."""


@attrs.frozen
class _Output:
    """Of a stored response."""

    output: list[msgspec.Raw]


@attrs.frozen
class _Head:
    """Of an item of it."""

    type: str
    status: str


_decode_output = msgspec.json.Decoder(_Output).decode
_decode_head = msgspec.json.Decoder(_Head).decode
_decode_item = msgspec.json.Decoder(InputItem).decode
_decode_items = msgspec.json.Decoder(list[InputItem]).decode


@attrs.frozen(eq=False)
class ContextReader:
    """Reads what one client has stored."""

    _store: ResponseStore | None
    _owner: str

    async def history(self, response_id: str | None) -> list[InputItem]:
        """All that was said until the end of this response; None: nothing. Calls that were cut off are left
        out.

        Raises:
          ApiError: it, or one that it goes on from, is not stored (any more), or is still being made, or they
            are too long (400).
          StoreError: the store cannot be read.
        """
        if response_id is None:
            return []
        if self._store is None:
            raise previous_not_found(response_id)
        try:
            responses = await self._store.history(self._owner, response_id, MAX_CONTEXT_BYTES)
        except UnknownResponseError as error:
            raise previous_not_found(error.response_id) from None
        except HistoryTooLongError:
            raise conversation_too_long("previous_response_id", f"{MAX_CONTEXT_BYTES} bytes") from None
        if responses[-1].is_open:
            raise still_in_progress(response_id)
        items = await _read_items(responses)
        if len(items) > MAX_MESSAGES:
            raise conversation_too_long("previous_response_id", f"{MAX_MESSAGES} items")
        return items

    async def resolve(self, items: Sequence[InputItem]) -> list[InputItem]:
        """`items` with what they refer to in the place of references.

        Raises:
          ApiError: an item is not stored (404), is referred to twice, or all are too long (400).
          StoreError: the store cannot be read.
        """
        references = _References(self._store, self._owner)
        return [
            await references.find(item.id or "", f"input[{index}].id")
            if item.kind == "item_reference"
            else item
            for index, item in enumerate(items)
        ]


@attrs.define(eq=False)
class _References:
    """Those of one input. Each response is read once, and each item is there once."""

    _store: ResponseStore | None
    _owner: str
    _num_bytes: int = attrs.field(init=False, default=0)
    _seen: set[str] = attrs.field(init=False, factory=set)
    _found: dict[str, dict[str | None, InputItem]] = attrs.field(init=False, factory=dict)
    """By response and item."""

    async def find(self, item_id: str, path: str) -> InputItem:
        """The item; `path` is where it was asked for. Raises as `ContextReader.resolve` does."""
        if item_id in self._seen:
            raise item_given_twice(item_id, path)
        self._seen.add(item_id)
        response_id = response_of_item(item_id)
        if response_id is None:
            raise item_not_found(item_id, path)
        if response_id not in self._found:
            self._found[response_id] = await self._read(response_id, path)
        item = self._found[response_id].get(item_id)
        if item is None:
            raise item_not_found(item_id, path)
        return item

    async def _read(self, response_id: str, path: str) -> dict[str | None, InputItem]:
        stored = None if self._store is None else await self._store.get(self._owner, response_id)
        if stored is None:
            return {}
        self._num_bytes += stored.size_said
        if self._num_bytes > MAX_CONTEXT_BYTES:
            raise conversation_too_long(path, f"{MAX_CONTEXT_BYTES} bytes, with the references before it")
        return {item.id: item for item in await _read_items([stored])}


async def _read_items(responses: Sequence[StoredResponse]) -> list[InputItem]:
    """In the order in which they were said."""

    def read() -> list[InputItem]:
        return [item for stored in responses for item in _items_of(stored)]

    if sum(stored.size_said for stored in responses) < _LARGE:
        return read()
    return await trio.to_thread.run_sync(read)


def _items_of(stored: StoredResponse) -> list[InputItem]:
    output = _decode_output(stored.response).output
    return _decode_items(stored.items) + [_decode_item(item) for item in output if _can_be_said_again(item)]


def _can_be_said_again(item: msgspec.Raw) -> bool:
    """Not so calls that were cut off."""
    head = _decode_head(item)
    return head.type != "function_call" or head.status == "completed"
