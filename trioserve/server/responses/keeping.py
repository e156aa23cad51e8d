"""Putting one response into the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import msgspec

from trioserve.server.protocol.responses_items import ItemResource
from trioserve.server.responses.store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    from trioserve.server.protocol.responses import ResponseObject
    from trioserve.server.responses.event_log import EventLog

__all__ = ["Keeper"]

_encode = msgspec.json.Encoder().encode


@attrs.define(eq=False)
class Keeper:
    """Knows what is kept of a response beside the response itself."""

    _store: ResponseStore
    owner: str
    response_id: str
    previous_id: str | None
    items: Sequence[ItemResource]
    """The input."""
    _is_forgotten: bool = attrs.field(init=False, default=False)

    def forget(self) -> None:
        """From now on nothing is kept, and the next `keep` takes out what is there."""
        self._is_forgotten = True

    async def keep(
        self, response: ResponseObject, log: EventLog | None = None, last: Sequence[bytes] = ()
    ) -> None:
        """Store it as it is now. The events of `log` and `last` are those of a response that has ended.

        Raises:
          StoreError: it could not be stored.
        """
        if not self._is_forgotten:
            await self._store.put(self._stored(response, log, last))
        if self._is_forgotten:  # before, or while it was put
            await self._store.delete(self.owner, self.response_id)

    def _stored(
        self, response: ResponseObject, log: EventLog | None, last: Sequence[bytes]
    ) -> StoredResponse:
        return StoredResponse(
            id=self.response_id,
            owner=self.owner,
            previous_id=self.previous_id,
            response=_encode(response),
            items=_encode(self.items),
            is_open=response.status in {"queued", "in_progress"},
            events=b"" if log is None else log.joined() + b"".join(last),
            first_event=0 if log is None else log.first,
        )
