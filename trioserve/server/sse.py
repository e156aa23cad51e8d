"""Server-sent events from an object that is asked for one frame after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quart import Response

from trioserve.server.streamed_body import StreamedBody

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ForwardingSource", "FrameBody", "FrameSource", "sse_response"]


class FrameSource(Protocol):
    async def next_frame(self) -> bytes | None:
        """Wait for the next bytes to send; None at the end. Called by one task, once at a time."""

    def last_frames(self, error: Exception) -> bytes:
        """What to send after the last whole frame, if `error` ended the stream."""


@runtime_checkable
class ForwardingSource(FrameSource, Protocol):
    """One that can do without waking its consumer for each frame."""

    async def forward(self, send_now: Callable[[bytes], bool]) -> None:
        """Have `send_now` called with the next frames as they come, at once and in any task, until it returns
        False, which means that it has taken them but wants no more now, or until what comes next is for
        `next_frame`. `send_now` does not wait. Returns at once where that does not go; cancelled, it loses
        nothing."""


class FrameBody(StreamedBody):
    """One that makes one write of each frame.

    Ended from outside, it can still be given a proper end: `last_frames`.
    """

    def __init__(self, source: FrameSource) -> None:
        self._source = source
        self.forward = source.forward if isinstance(source, ForwardingSource) else None
        """Of the source, if it has that."""

    async def __anext__(self) -> bytes:
        frame = await self._source.next_frame()
        if frame is None:
            raise StopAsyncIteration
        return frame

    def last_frames(self, error: Exception) -> bytes:
        """What to send after the last whole frame, if `error` ended the stream."""
        return self._source.last_frames(error)


def sse_response(source: FrameSource) -> Response:
    """A response of `source`'s frames, each a whole number of events, with no limit on its time."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = Response(FrameBody(source), headers=headers, content_type="text/event-stream; charset=utf-8")
    response.timeout = None
    return response
