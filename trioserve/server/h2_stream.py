"""One request of an HTTP/2 connection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from trioserve.server.request_stream import RequestStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.protocol.events import Event
    from hypercorn.typing import ASGIReceiveEvent, TaskGroup

    from trioserve.server.http_context import Address, ServingContext

__all__ = ["Http2Stream"]


class Http2Stream(RequestStream):
    """A request whose client is told to go on with the body as the application takes it.

    Its inbox is bounded by the stream's window, 64 KiB, and by what `FrameBudget` lets pass of small frames.
    """

    def __init__(
        self,
        context: ServingContext,
        tasks: TaskGroup,
        addresses: tuple[Address, Address],
        send: Callable[[Event], Awaitable[None]],
        *,
        stream_id: int,
        taken: Callable[[int, int], None],
        ended: Callable[[], None],
    ) -> None:
        """`taken(stream_id, size)` says that the application took of the body, `ended` that it returned."""
        super().__init__(context, tasks, addresses, send, stream_id=stream_id, max_inbox=math.inf)
        self._taken = taken
        self._ended = ended
        self.body_size = 0
        self.num_untaken = 0  # bytes of the body that wait for the application
        self.head: list[tuple[bytes, bytes]] | None = None  # of a response whose body has not begun
        self.has_answered = False  # a head went out
        self.is_cut = False  # a part of what is being sent is on its way, and the rest is not
        self.is_complete = False  # the end of the response went out
        self.window = trio.lowlevel.ParkingLot()  # where it waits until its client lets it send

    @property
    def status(self) -> int:
        """As the access log will show it."""
        return self._status

    def take_body(self, data: bytes) -> None:
        """Put a part of the body into the inbox."""
        self.body_size += len(data)
        if not data:
            return
        if self._deliver({"type": "http.request", "body": data, "more_body": True}):
            self.num_untaken += len(data)
        else:
            self._taken(self.stream_id, len(data))

    def take_end(self) -> None:
        self._deliver({"type": "http.request", "body": b"", "more_body": False})

    def _deliver(self, message: ASGIReceiveEvent) -> bool:
        """False where nobody will take it any more."""
        try:
            self._to_app.send_nowait(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def _receive(self) -> ASGIReceiveEvent:
        message = await super()._receive()
        if message["type"] == "http.request" and (size := len(message["body"])):
            self.num_untaken -= size
            self._taken(self.stream_id, size)
        return message

    async def _run(self) -> None:
        try:
            await super()._run()
        finally:
            self._ended()
