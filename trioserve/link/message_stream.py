"""Messages both ways over one byte stream, sent without waiting."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import trio

from trioserve.link.framing import FrameReader, frame
from trioserve.link.messages import decode_message, encode_message

if TYPE_CHECKING:
    from trioserve.link.messages import Message

__all__ = ["MessageStream"]

_ROOM = 8 * 2**20


class MessageStream:
    """One end of the link.

    Sending is synchronous, so that an abort can be sent from a cancelled scope, a finalizer or `__exit__`:
    `send_nowait` puts the message into a buffer that `run_writer` empties. Whoever opens the stream runs
    `run_writer` in a nursery beside it.

    The buffer's bound: a client adds a request only while there is room (`has_room`), and beside them one
    Abort per request, one Utility per caller that waits, and, to a core that was restarted, what waits for it
    already; a core calls `wait_room` once per step.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._frames = FrameReader(stream)
        self._outbound = bytearray()
        self._in_flight = 0  # bytes that the writer has taken and the kernel has not
        self._wake_writer = trio.Event()
        self._room_made = trio.Event()
        self._is_idle = trio.Event()
        self.broken = False
        """True once a write failed: nothing sent from then on arrives."""

    def send_nowait(self, message: Message) -> None:
        """Queue `message`; after the other side has gone, it is dropped."""
        if not self.broken:
            self._outbound += frame(encode_message(message))
            if self._is_idle.is_set():
                self._is_idle = trio.Event()
            self._wake_writer.set()

    async def receive(self) -> Message | None:
        """The next message, or None when the other side has closed its end or broken off.

        Raises:
          MessageError: what came is no message, or (CutOffError) only the beginning of one.
        """
        try:
            body = await self._frames.receive()
        except trio.BrokenResourceError:
            return None
        return None if body is None else decode_message(body)

    async def wait_room(self) -> None:
        """Wait while more than 8 MiB are waiting to be sent. No checkpoint where there is room."""
        while not self.has_room:
            if self._room_made.is_set():  # else others wait for it
                self._room_made = trio.Event()
            await self._room_made.wait()

    @property
    def has_room(self) -> bool:
        """At most 8 MiB are waiting to be sent."""
        return self.broken or len(self._outbound) + self._in_flight <= _ROOM

    async def run_writer(self) -> None:
        """Send what is queued, until cancelled. Returns early if the stream breaks."""
        try:
            while True:
                if not self._outbound:
                    self._is_idle.set()
                    await self._wake_writer.wait()
                    self._wake_writer = trio.Event()
                    continue
                data, self._outbound = self._outbound, bytearray()
                self._in_flight = len(data)
                await self._stream.send_all(data)
                self._in_flight = 0
                self._room_made.set()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.broken = True
            self._outbound.clear()
            self._room_made.set()
            self._is_idle.set()

    async def flush(self) -> None:
        """Wait until `run_writer` has handed everything to the kernel, or the stream is broken."""
        if not self.broken:
            await self._is_idle.wait()

    def shut_down_sending(self) -> None:
        """Send an end of file at once; what is still queued is lost."""
        self.broken = True
        with contextlib.suppress(OSError):  # the other side is gone already
            self._stream.socket.shutdown(trio.socket.SHUT_WR)

    def close(self) -> None:
        """Close both directions at once."""
        self._stream.socket.close()
