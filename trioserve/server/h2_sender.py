"""What goes out on one HTTP/2 connection, as far as the client takes it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hyperframe.frame import GoAwayFrame

from trioserve.server.h2_budget import SMALL_DATA, FrameBudget
from trioserve.server.h2_outbox import MAX_FRAME, Outbox

if TYPE_CHECKING:
    from trioserve.server.h2_request import Headers
    from trioserve.server.h2_stream import Http2Stream

__all__ = ["Http2Sender"]

_FRAMES_PER_CHECKPOINT = 16


@attrs.define(eq=False)
class Http2Sender:
    """Turns what streams say into frames in the outbox.

    The client may close a stream, or everything, at any time: then what is said of it is dropped.
    """

    h2: H2Connection
    outbox: Outbox
    _budget: FrameBudget
    _patience: float
    """Seconds without progress after which a stream that may not send is given up."""
    _num_frames: int = 0

    async def send_body(self, stream: Http2Stream, data: bytes) -> bool:
        """Send a part of a response's body, waiting for the client's window and for room.

        Returns False if the client let nothing pass for too long, or has left.
        Always lets a cancellation in; lets other tasks run where it has to wait, and now and then.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.send_head(stream)
        rest, deadline = memoryview(data), None
        while rest:
            if stream.closed:
                return False
            size = self._sendable(stream, len(rest))
            if size:
                self.h2.send_data(stream.stream_id, bytes(rest[:size]))
                rest, deadline = rest[size:], None
                stream.is_cut = bool(rest)
                await self._after_frame(useful=not rest or size >= SMALL_DATA)
                continue
            # The deadline holds until there is progress, however often this wakes up.
            deadline = deadline or trio.current_time() + self._patience
            with trio.CancelScope(deadline=deadline) as waiting:
                await self._wait_to_send(stream)
            if waiting.cancelled_caught:
                return False
        return True

    def send_head(self, stream: Http2Stream, *, end: bool = False) -> None:
        """Send the head that the stream holds, if it still does."""
        if stream.head is not None:
            self.h2.send_headers(stream.stream_id, stream.head, end_stream=end)
            stream.head = None
            stream.has_answered = True
            self.flush()

    def send_end(self, stream: Http2Stream) -> None:
        """The response is complete."""
        if stream.head is not None:
            self.send_head(stream, end=True)
        else:
            self.h2.end_stream(stream.stream_id)
            self.flush()
        stream.is_complete = True
        self._budget.response_ended()

    def answer(self, stream_id: int, head: Headers, body: bytes) -> None:
        """Send a whole response that is short. One that the client's window does not let pass is not sent."""
        with suppress(ProtocolError):
            self.h2.send_headers(stream_id, head, end_stream=not body)
            if len(body) > self.h2.local_flow_control_window(stream_id):
                self.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
            elif body:
                self.h2.send_data(stream_id, body, end_stream=True)
        self.flush()

    def reset(self, stream_id: int, code: ErrorCodes) -> None:
        with suppress(ProtocolError):
            self.h2.reset_stream(stream_id, code)
        self.flush()

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Let the client send so many bytes more."""
        if size:
            self.h2.acknowledge_received_data(size, stream_id)
            self.flush()

    def goaway(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> bytes:
        """The frame that says that no further stream will be served.

        Not by `H2Connection.close_connection`: after that it lets running streams send nothing more.
        """
        frame = GoAwayFrame(0, last_stream_id=self.h2.highest_inbound_stream_id, error_code=code)
        return frame.serialize()

    def flush(self) -> None:
        self.outbox.put(self.h2.data_to_send())

    def _sendable(self, stream: Http2Stream, wanted: int) -> int:
        """Bytes that may be sent now."""
        if not self.outbox.has_room:
            return 0
        return max(0, min(wanted, MAX_FRAME, self.h2.local_flow_control_window(stream.stream_id)))

    async def _wait_to_send(self, stream: Http2Stream) -> None:
        """Wait until what keeps the stream from sending may be gone."""
        if self.h2.local_flow_control_window(stream.stream_id) > 0:
            await self.outbox.wait_for_room()
        else:
            await stream.window.park()

    async def _after_frame(self, *, useful: bool) -> None:
        """`useful` is not what a window cut to almost nothing: those would pay for the updates that do so."""
        self.flush()
        if useful:
            self._budget.data_frame_sent()
        self._num_frames += 1
        if not self._num_frames % _FRAMES_PER_CHECKPOINT:
            await trio.lowlevel.checkpoint()
