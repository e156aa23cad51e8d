"""What waits to be written on one HTTP/2 connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["MAX_FRAME", "Outbox"]

MAX_FRAME = 16 * 1024
"""Bytes of a DATA frame that is sent; every client takes as many (RFC 9113, section 4.2)."""

# Bytes of answers to a client that sends and does not read, beyond which it is not answered any more.
_MAX_UNREAD = 128 * 1024


@attrs.define(eq=False)
class Outbox:
    """Many streams put frames in, one task writes them out.

    A stream that is cancelled can so never cut a frame short that others need to follow, and what several
    streams send in one step of the engine leaves in one write. Streams put DATA in only while `has_room`: the
    outbox holds less than two frames of it, and another two are being written.
    """

    _data: bytearray = attrs.field(factory=bytearray)
    _filled: trio.Event = attrs.field(factory=trio.Event)
    _ending: bool = False
    # Those that wait for room, or for their window to open.
    _waiting: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    @property
    def has_room(self) -> bool:
        return len(self._data) < MAX_FRAME

    @property
    def overflows(self) -> bool:
        """Whether the client makes us answer, and does not read the answers."""
        return len(self._data) > _MAX_UNREAD

    def put(self, data: bytes) -> None:
        if data:
            self._data += data
            self._filled.set()

    def end(self) -> None:
        """What is put in so far is the last."""
        self._ending = True
        self._filled.set()

    def discard(self) -> None:
        """Write nothing more: the client is gone."""
        self._data.clear()
        self.end()

    async def wait_for_change(self) -> None:
        """Wait until there may be room, or a window may have opened."""
        await self._waiting.park()

    def changed(self) -> None:
        self._waiting.unpark_all()

    async def write_out(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write until the end."""
        while True:
            await self._filled.wait()
            if not self._data:
                if self._ending:
                    return
                self._filled = trio.Event()
                continue
            data, self._data = bytes(self._data), bytearray()
            self.changed()
            await write(data)
