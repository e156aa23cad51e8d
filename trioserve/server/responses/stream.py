"""The stream of a response that its client waits for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from trioserve.server.responses.keeping import Keeper
from trioserve.server.responses.store import StoreError
from trioserve.server.responses.writer import ResponseWriter
from trioserve.server.streaming import EventStream

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KeptStream", "keep_if_possible"]

_logger = logging.getLogger("trioserve.responses")


@attrs.frozen(eq=False)
class KeptStream:
    """An `EventStream` whose response is in the store before its last event goes out."""

    _events: EventStream
    _writer: ResponseWriter
    _keeper: Keeper | None

    async def next_frame(self) -> bytes | None:
        frames = await self._events.next_frame()
        if frames is not None and self._writer.has_ended:
            await keep_if_possible(self._keeper, self._writer)
        return frames

    async def forward(self, send_now: Callable[[bytes], bool]) -> None:
        """As `sse.ForwardingSource` has it. The last output, after which there is something to store, is
        never forwarded."""
        await self._events.forward(send_now)

    def last_frames(self, error: Exception) -> bytes:
        return self._events.last_frames(error)


async def keep_if_possible(keeper: Keeper | None, writer: ResponseWriter) -> None:
    """Store what has come to its end. What cannot be stored is an answer all the same, and is logged."""
    if keeper is None or writer.response.status not in {"completed", "incomplete"}:
        return
    try:
        await keeper.keep(writer.response)
    except StoreError as error:
        _logger.error("a response could not be stored: %s", error)
