"""Server-sent events of a generation: an object that is asked for one frame after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from trioserve.server.errors import describe, rename
from trioserve.server.framing import KEEP_ALIVE
from trioserve.server.request_scope import request_deadline, time_limits
from trioserve.server.sse import sse_response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quart import Response

    from trioserve.outputs import RequestOutput
    from trioserve.server.deadlines import RequestDeadline
    from trioserve.server.errors import Failure
    from trioserve.server.generation import Outputs

__all__ = ["ChunkWriter", "EventStream", "start_stream"]


class ChunkWriter(Protocol):
    """An API's way of writing outputs as frames. Nothing here waits, and `write` is called in any task: it
    knows no request context (`quart.request`)."""

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        """All frames of an output, joined; may be empty.

        Raises:
          EngineGenerateError, ApiError: a completion did not end by itself.
        """

    def end(self) -> bytes:
        """The frames after the last output."""

    def fail(self, failure: Failure) -> bytes:
        """The frames with which a stream ends that did not come to its end. It may have begun in any state,
        or not at all."""


class EventStream:
    """Takes outputs and gives frames, as fast as its consumer asks.

    Outputs that come while the consumer is busy are merged by the engine's side, so one frame may carry
    many tokens. An error after the start is told in an event, and ends the stream.
    """

    def __init__(
        self,
        outputs: Outputs,
        writer: ChunkWriter,
        deadline: RequestDeadline,
        *,
        num_prompts: int,
        field_names: Mapping[str, str],
    ) -> None:
        """`field_names` as for `rename`."""
        self._outputs = outputs
        self._writer = writer
        self._deadline = deadline
        self._num_running = num_prompts
        self._field_names = field_names
        self._first: bytes | None = None
        self._ended = False

    async def start(self, patience: float) -> None:
        """Wait for the first output, so that what goes wrong until then is still a status code. After
        `patience` seconds without one, the stream begins with a comment instead.

        Raises:
          TrioserveError: no output came, or one that says so.
        """
        with trio.move_on_after(patience):
            self._first = await self._next_frames()
            return
        self._first = KEEP_ALIVE

    async def next_frame(self) -> bytes | None:
        """The next frames, joined: never empty, and None after the last one.

        Cancellation loses nothing that was asked for: the engine keeps what it could not hand over.
        """
        if self._first is not None:
            frames, self._first = self._first, None
            return frames
        if self._ended:
            return None
        try:
            return await self._next_frames()
        except Exception as error:
            await self._end()
            rename(error, self._field_names)
            return self._writer.fail(describe(error))

    async def forward(self, send_now: Callable[[bytes], bool]) -> None:
        """Have `send_now` called with frames as they come: see `ForwardingSource`."""
        if self._first is not None or self._ended:
            return

        def deliver(prompt_index: int, output: RequestOutput) -> bool:
            frames = self._writer.write(prompt_index, output)
            return not frames or send_now(frames)

        await self._outputs.forward(deliver)

    def last_frames(self, error: Exception) -> bytes:
        return self._writer.fail(describe(error))

    async def _next_frames(self) -> bytes:
        while True:
            prompt_index, output = await self._outputs.next()
            frames = self._writer.write(prompt_index, output)
            if output.finished:
                self._num_running -= 1
                if not self._num_running:
                    await self._end()
                    return frames + self._writer.end()
            if frames:
                return frames

    async def _end(self) -> None:
        self._ended = True
        await self._deadline.lift()


async def start_stream(
    outputs: Outputs, writer: ChunkWriter, *, num_prompts: int, field_names: Mapping[str, str]
) -> Response:
    """The response to the request at hand: a stream, once its first output is there or long in coming.

    Raises as `EventStream.start` does.
    """
    events = EventStream(
        outputs, writer, request_deadline(), num_prompts=num_prompts, field_names=field_names
    )
    await events.start(time_limits().keep_alive_interval)
    return sse_response(events)
