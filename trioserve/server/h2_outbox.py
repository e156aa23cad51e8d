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
    _waiting: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)  # for room

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

    async def wait_for_room(self) -> None:
        """Wait until there may be room."""
        await self._waiting.park()

    def report(self) -> None:
        """Have `write_out` tell when it has written everything."""
        self._filled.set()

    async def write_out(
        self, write: Callable[[bytes], Awaitable[None]], all_written: Callable[[], None]
    ) -> None:
        """Write until the end; call `all_written` whenever there is nothing left to write."""
        while True:
            await self._filled.wait()
            if not self._data:
                if self._ending:
                    return
                self._filled = trio.Event()
                all_written()
                continue
            data, self._data = bytes(self._data), bytearray()
            self._waiting.unpark_all()
            await write(data)
