"""A transcription as server-sent events, as OpenAI has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.server.errors import describe, rename
from trioserve.server.framing import DONE, KEEP_ALIVE, last_frames
from trioserve.server.protocol.speech import SpokenTextDelta, SpokenTextDone
from trioserve.server.request_scope import request_deadline, time_limits
from trioserve.server.sse import sse_response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quart import Response

    from trioserve.frontend.transcription import TranscriptionStream
    from trioserve.frontend.transcription_outputs import Transcription
    from trioserve.server.deadlines import RequestDeadline
    from trioserve.server.protocol.speech import TokenUsage

__all__ = ["start_speech_events"]

_encode = msgspec.json.Encoder().encode


class _SpeechEvents:
    """A `FrameSource`. An error after the start is told in an event, and ends the stream."""

    def __init__(
        self,
        stream: TranscriptionStream,
        deadline: RequestDeadline,
        usage_of: Callable[[Transcription], TokenUsage],
        field_names: Mapping[str, str],
    ) -> None:
        self._stream = stream
        self._deadline = deadline
        self._usage_of = usage_of
        self._field_names = field_names
        self._first: bytes | None = None
        self._ended = False

    async def start(self, patience: float) -> None:
        """Wait for the first text, so that what goes wrong until then is still a status code. After
        `patience` seconds without, the stream begins with a comment instead."""
        with trio.move_on_after(patience):
            self._first = await self._next_event()
            return
        self._first = KEEP_ALIVE

    async def next_frame(self) -> bytes | None:
        if self._first is not None:
            frame, self._first = self._first, None
            return frame
        if self._ended:
            return None
        try:
            return await self._next_event()
        except Exception as error:
            await self._end()
            rename(error, self._field_names)
            return self.last_frames(error)

    def last_frames(self, error: Exception) -> bytes:
        return last_frames(describe(error).detail)

    async def _next_event(self) -> bytes:
        async for update in self._stream:
            if update.text:
                return _frame(SpokenTextDelta(delta=update.text))
        await self._end()
        result = self._stream.result
        return _frame(SpokenTextDone(text=result.text, usage=self._usage_of(result))) + DONE

    async def _end(self) -> None:
        self._ended = True
        await self._deadline.lift()


def _frame(event: object) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"


async def start_speech_events(
    stream: TranscriptionStream,
    usage_of: Callable[[Transcription], TokenUsage],
    field_names: Mapping[str, str],
) -> Response:
    """The response to the request at hand, once its first text is there or long in coming.

    Raises what reading `stream` raises.
    """
    events = _SpeechEvents(stream, request_deadline(), usage_of, field_names)
    await events.start(time_limits().keep_alive_interval)
    return sse_response(events)
