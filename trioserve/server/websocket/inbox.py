"""Messages of a client that wait for the application."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveEvent

__all__ = ["Inbox"]

# What an empty message counts as: it takes memory too.
_MESSAGE_BYTES = 256


class Inbox:
    """A queue that is bounded in bytes: a further message is taken as long as there are fewer than that.

    One task puts, one gets.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._messages: deque[tuple[ASGIReceiveEvent, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._max_bytes and not self._closed

    async def put(self, message: ASGIReceiveEvent, size: int) -> None:
        """Wait until there is room. A closed inbox drops it. Not a checkpoint if there is room."""
        while self.is_full:
            await self._changed.park()
        if not self._closed:
            self._messages.append((message, size + _MESSAGE_BYTES))
            self._bytes += size + _MESSAGE_BYTES
            self._changed.unpark_all()

    async def get(self) -> ASGIReceiveEvent | None:
        """The next message; None when the inbox is closed, whatever is left in it. A checkpoint."""
        await trio.lowlevel.checkpoint()
        while not self._messages and not self._closed:
            await self._changed.park()
        if self._closed:
            return None
        message, size = self._messages.popleft()
        self._bytes -= size
        self._changed.unpark_all()
        return message

    def close(self) -> None:
        """Nobody puts or gets any more. Never waits."""
        self._closed = True
        self._messages.clear()
        self._bytes = 0
        self._changed.unpark_all()
