"""What a store of responses keeps, and how it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from trioserve.errors import TrioserveError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "HistoryTooLongError",
    "ResponseStore",
    "StoreError",
    "StoreLimits",
    "StoredResponse",
    "UnknownResponseError",
]


class StoreError(TrioserveError):
    """The store cannot read or write; the message says why."""


class UnknownResponseError(TrioserveError):
    """There is no such response, any more, of this owner."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self.response_id = response_id


class HistoryTooLongError(TrioserveError):
    """It has more bytes than were wanted."""


@attrs.frozen(kw_only=True)
class StoreLimits:
    """Whichever is reached first: then those go that were not used for the longest time."""

    max_responses: int
    max_bytes: int
    """Of responses, inputs and events, as JSON."""
    ttl: float
    """Seconds after the last use."""


@attrs.frozen(kw_only=True)
class StoredResponse:
    """Nothing in here ever changes."""

    id: str
    owner: str
    """See `auth.client_of_request`."""
    previous_id: str | None
    response: bytes
    """JSON of a ResponseObject."""
    items: bytes
    """JSON of a list of ItemResources: the input, without that of earlier responses."""
    is_open: bool = False
    """It is being made, in the background."""
    events: bytes = b""
    """Frames, of a background response that has ended."""
    first_event: int = 0
    """The sequence number of the first of them."""

    @property
    def size(self) -> int:
        """Bytes, without what keeping it costs."""
        return self.size_said + len(self.events)

    @property
    def size_said(self) -> int:
        """Bytes of what a history needs."""
        return len(self.response) + len(self.items)


class ResponseStore(Protocol):
    """Keeps responses within `StoreLimits`.

    What another owner has is as if it was not there. A response is used when it is written, read, or part of
    a history. Every call is a checkpoint; one that is cancelled has happened or not.

    Raises (all of these) StoreError: it cannot read or write.
    """

    async def put(self, stored: StoredResponse) -> None:
        """Keep it, in the place of what has the same id. What alone is larger than the limit is dropped."""

    async def get(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def history(self, owner: str, response_id: str, max_bytes: int) -> Sequence[StoredResponse]:
        """It and all those that it goes on from, the first one first; their events may be left out.

        Raises:
          UnknownResponseError: one of them is not there.
          HistoryTooLongError: they have more than `max_bytes`, events apart.
        """

    async def delete(self, owner: str, response_id: str) -> bool:
        """False if there was none."""
