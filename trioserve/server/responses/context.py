"""What a response goes on from: earlier responses, and items that the input refers to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec

from trioserve.server.protocol.responses_items import InputItem
from trioserve.server.responses.ids import response_of_item
from trioserve.server.responses.refusals import item_not_found, previous_not_found, still_in_progress
from trioserve.server.responses.store import ResponseStore, UnknownResponseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.server.responses.store import StoredResponse

__all__ = ["ContextReader"]


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
          ApiError: it, or one that it goes on from, is not stored (any more), or is still being made (400).
          StoreError: the store cannot be read.
        """
        if response_id is None:
            return []
        if self._store is None:
            raise previous_not_found(response_id)
        try:
            responses = await self._store.history(self._owner, response_id)
        except UnknownResponseError as error:
            raise previous_not_found(error.response_id) from None
        if responses[-1].is_open:
            raise still_in_progress(response_id)
        return [item for stored in responses for item in _items_of(stored)]

    async def resolve(self, items: Sequence[InputItem]) -> list[InputItem]:
        """`items` with what they refer to in the place of references.

        Raises:
          ApiError: an item is not stored (404).
          StoreError: the store cannot be read.
        """
        return [
            await self._find(item.id or "", index) if item.kind == "item_reference" else item
            for index, item in enumerate(items)
        ]

    async def _find(self, item_id: str, index: int) -> InputItem:
        response_id = response_of_item(item_id)
        if response_id is not None and self._store is not None:
            stored = await self._store.get(self._owner, response_id)
            for item in [] if stored is None else _items_of(stored):
                if item.id == item_id:
                    return item
        raise item_not_found(item_id, f"input[{index}].id")


def _items_of(stored: StoredResponse) -> list[InputItem]:
    output = _decode_output(stored.response).output
    return _decode_items(stored.items) + [_decode_item(item) for item in output if _can_be_said_again(item)]


def _can_be_said_again(item: msgspec.Raw) -> bool:
    """Not so calls that were cut off: their arguments are no JSON."""
    head = _decode_head(item)
    return head.type != "function_call" or head.status == "completed"
