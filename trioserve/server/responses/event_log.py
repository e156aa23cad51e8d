"""The events of a background response, for those who read them later or again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.responses_events import ErrorEvent
from trioserve.server.responses.frames import event_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["MAX_LOG_BYTES", "EventFollower", "EventLog"]

MAX_LOG_BYTES = 8 * 2**20
"""Of one response's events; of more than that, the first ones are forgotten."""

_MAX_FRAME = 64 * 1024
"""Bytes, or one event: so much is written at a time of what has come already."""


class EventLog:
    """The frames of events, of which the n-th has the sequence number n. One task writes, any number read."""

    def __init__(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._max_bytes = max_bytes
        # Invariant: `_size` is their length, and at most `_max_bytes` unless there is only one.
        self._frames: deque[bytes] = deque()
        self._size = 0
        self._arrival = trio.lowlevel.ParkingLot()
        self.first = 0
        """The sequence number of the first one that is kept."""
        self.is_closed = False
        """Nothing more comes."""

    @classmethod
    def of_stored(cls, events: bytes, first: int) -> EventLog:
        """What `joined` gave, of a log that was closed."""
        log = cls(max(MAX_LOG_BYTES, len(events)))
        log.first = first
        log.append(frame + b"\n\n" for frame in events.split(b"\n\n") if frame)
        log.close()
        return log

    @property
    def end(self) -> int:
        """The sequence number that comes next."""
        return self.first + len(self._frames)

    def append(self, frames: Iterable[bytes]) -> None:
        """Never waits."""
        for frame in frames:
            self._frames.append(frame)
            self._size += len(frame)
        while self._size > self._max_bytes and len(self._frames) > 1:
            self._size -= len(self._frames.popleft())
            self.first += 1
        self._arrival.unpark_all()

    def close(self) -> None:
        self.is_closed = True
        self._arrival.unpark_all()

    def joined(self) -> bytes:
        return b"".join(self._frames)

    def follow(self, starting_after: int) -> EventFollower:
        """Reads what comes after that event; -1: everything.

        Raises:
          InvalidRequestError: that is not kept any more, or there never was such an event.
        """
        if not self.first - 1 <= starting_after < self.end:
            least = "not given, or from 0" if self.first == 0 else f"from {self.first - 1}"
            raise InvalidRequestError(
                f"starting_after must be {least} to {self.end - 1}, the last event so far, "
                f"got {starting_after}.",
                parameter="starting_after",
            )
        return EventFollower(self, starting_after + 1)

    async def wait_for(self, sequence_number: int) -> None:
        """Until there is an event of this number, or the log is closed. Always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while self.end <= sequence_number and not self.is_closed:
            await self._arrival.park()

    def since(self, sequence_number: int) -> Sequence[bytes]:
        """Some of the frames from there on, none only if there are none; it must not be before `first`."""
        taken: list[bytes] = []
        size = 0
        for index in range(sequence_number - self.first, len(self._frames)):
            frame = self._frames[index]
            if taken and size + len(frame) > _MAX_FRAME:
                break
            taken.append(frame)
            size += len(frame)
        return taken


class EventFollower:
    """A stream of a log's events (`sse.FrameSource`). Whoever leaves it changes nothing."""

    def __init__(self, log: EventLog, position: int) -> None:
        self._log = log
        self._position = position
        self._was_left_behind = False

    async def next_frame(self) -> bytes | None:
        """The next frames, joined. None after the last one."""
        await self._log.wait_for(self._position)
        if self._was_left_behind:
            return None
        if self._position < self._log.first:
            self._was_left_behind = True
            return self._error("events_dropped", "Events were dropped before they could be sent.")
        frames = self._log.since(self._position)
        self._position += len(frames)
        return b"".join(frames) or None

    def last_frames(self, error: Exception) -> bytes:
        """The response goes on; only this stream of it ends."""
        return self._error("stream_ended", str(error))

    def _error(self, code: str, message: str) -> bytes:
        event = ErrorEvent(sequence_number=self._position, code=code, message=message, param=None)
        return event_frame(event)
