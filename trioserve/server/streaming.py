"""Server-sent events of a generation: an object that is asked for one frame after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trioserve.server.errors import describe
from trioserve.server.framing import DONE, error_frame

if TYPE_CHECKING:
    from trioserve.outputs import RequestOutput
    from trioserve.server.generation import Outputs

__all__ = ["ChunkWriter", "EventStream"]


class ChunkWriter(Protocol):
    """An API's way of writing outputs as frames. Nothing here waits."""

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        """All frames of an output, joined; may be empty.

        Raises:
          EngineGenerateError, ApiError: a completion did not end by itself.
        """

    def end(self) -> bytes:
        """The frames after the last output, without `[DONE]`."""


class EventStream:
    """Takes outputs and gives frames, as fast as its consumer asks.

    Outputs that come while the consumer is busy are merged by the engine's side, so one frame may carry
    many tokens. An error after the start is told in an event, and ends the stream.
    """

    def __init__(self, outputs: Outputs, writer: ChunkWriter, *, num_prompts: int) -> None:
        self._outputs = outputs
        self._writer = writer
        self._num_running = num_prompts
        self._first: bytes | None = None
        self._ended = False

    async def start(self) -> None:
        """Wait for the first output, so that what goes wrong until then is still a status code.

        Raises:
          TrioserveError: no output came, or one that says so.
        """
        self._first = await self._next_frames()

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
            self._ended = True
            return error_frame(describe(error).detail) + DONE

    async def _next_frames(self) -> bytes:
        while True:
            prompt_index, output = await self._outputs.next()
            frames = self._writer.write(prompt_index, output)
            if output.finished:
                self._num_running -= 1
                if not self._num_running:
                    self._ended = True
                    return frames + self._writer.end() + DONE
            if frames:
                return frames
