"""One client that speaks, and what it is told of what was heard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

import attrs
import msgspec
import trio

from trioserve.audio.speech import Speech
from trioserve.errors import TrioserveError
from trioserve.server.errors import describe
from trioserve.server.protocol.realtime import (
    AudioAppend,
    AudioClear,
    AudioCommit,
    ClientEvent,
    EventError,
    SessionUpdate,
    read_event,
)
from trioserve.server.realtime.dialects import OpenAIDialect
from trioserve.server.realtime.intake import Commit, Intake, Window

if TYPE_CHECKING:
    from trioserve.server.realtime.settings import SessionSettings

__all__ = ["Ending", "Peer", "RealtimeSession"]

_MAX_JOBS = 4
"""Windows that wait to be heard. With what is being cut, that bounds the audio that a session holds: two and
a half minutes, and one event."""

_LARGE_EVENT = 2**18
"""Characters; larger ones are read in a thread."""


class Ending(Enum):
    """Why a session has ended, other than by its client's leaving, which cancels it."""

    DRAINED = auto()
    IDLE = auto()


@attrs.frozen
class Peer:
    """The client."""

    receive: Callable[[], Awaitable[str | bytes]]
    """Wait for its next message. A cancellation loses nothing."""
    send: Callable[[str], Awaitable[None]]


class RealtimeSession:
    """Takes audio, and tells its text: of each window as soon as it was cut, and of an item when it is
    committed.

    Two tasks: one takes what the client says, and waits when `_MAX_JOBS` windows wait; the other has one
    after the other heard. A window that fails ends its item, and not the session.
    """

    def __init__(
        self,
        peer: Peer,
        settings: SessionSettings,
        *,
        draining: trio.Event,
        idle_timeout: float,
        max_json_depth: int,
        reading: trio.CapacityLimiter,
    ) -> None:
        """
        Args:
          draining: set when the server begins to shut down.
          idle_timeout: seconds; without an event for so long, and nothing to do, the session ends.
          reading: of the threads that read large events.
        """
        self._peer = peer
        self._intake = Intake(settings)
        self._draining = draining
        self._idle_timeout = idle_timeout
        self._max_json_depth = max_json_depth
        self._to_hear, self._jobs = trio.open_memory_channel[Window | Commit](_MAX_JOBS)
        self._is_hearing = False
        self._listening = trio.CancelScope()
        self._reading = reading

    async def run(self) -> Ending:
        """Until the client leaves, which cancels this; until the server drains, when what was said by then is
        still heard; or until the session is idle for too long."""
        await self._tell(self._intake.settings.created())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_when_draining)
            ending = await self._listen_and_hear()
            nursery.cancel_scope.cancel()
        return ending

    async def _stop_when_draining(self) -> None:
        await self._draining.wait()
        self._listening.cancel()

    async def _listen_and_hear(self) -> Ending:
        ending = Ending.DRAINED
        async with trio.open_nursery() as nursery, self._to_hear:
            nursery.start_soon(self._hear_all)
            with self._listening:
                await self._listen()
                ending = Ending.IDLE
            self._intake.cut_rest()
            if self._intake.item.seconds:
                self._intake.commit()
            await self._deliver()
        return ending

    # What the client says

    async def _listen(self) -> None:
        """Until the client is idle."""
        while (message := await self._next_message()) is not None:
            try:
                await self._take(await self._read(message))
            except EventError as error:
                await self._tell(self._intake.dialect.error(error))

    async def _next_message(self) -> str | bytes | None:
        while True:
            with trio.move_on_after(self._idle_timeout):
                return await self._peer.receive()
            if not (self._is_hearing or self._jobs.statistics().current_buffer_used):
                return None

    async def _read(self, message: str | bytes) -> ClientEvent:
        if isinstance(message, bytes):
            raise EventError("invalid_event", "An event is a text message, got a binary one.")
        if len(message) < _LARGE_EVENT:
            return read_event(message, self._max_json_depth)
        return await trio.to_thread.run_sync(read_event, message, self._max_json_depth, limiter=self._reading)

    async def _take(self, event: ClientEvent) -> None:
        match event:
            case SessionUpdate():
                self._intake.update(self._intake.settings.updated(event))
            case AudioAppend():
                self._check_ready(event)
                await self._append(event)
            case AudioCommit():
                self._check_ready(event)
                self._commit(event)
            case AudioClear():
                self._intake.clear()
        await self._deliver()

    async def _append(self, event: AudioAppend) -> None:
        if len(event.audio) < _LARGE_EVENT:
            self._intake.append(event)
        else:
            await trio.to_thread.run_sync(self._intake.append, event, limiter=self._reading)

    def _commit(self, event: AudioCommit) -> None:
        """vLLM's ends an item only if it is final; OpenAI's always does."""
        intake = self._intake
        if not isinstance(intake.dialect, OpenAIDialect):
            (intake.commit if event.final else intake.cut_rest)()
        elif intake.item.seconds:
            intake.commit()
        else:
            message = "There is no audio to commit."
            raise EventError("input_audio_buffer_commit_empty", message, None, event.event_id)

    def _check_ready(self, event: AudioAppend | AudioCommit) -> None:
        if self._intake.dialect.needs_model and not self._intake.settings.is_model_said:
            message = "The model must be said first, by a session.update."
            raise EventError("model_not_validated", message, "model", event.event_id)

    async def _deliver(self) -> None:
        """Tell what is to be told, and hand over what is to be heard. What a cancellation leaves of these is
        handed over the next time."""
        untold, unheard = self._intake.untold, self._intake.unheard
        while untold:
            await self._tell(untold.pop(0))
        while unheard:
            await self._to_hear.send(unheard[0])
            del unheard[0]

    # From windows to text

    async def _hear_all(self) -> None:
        async for job in self._jobs:
            self._is_hearing = True
            if job.item.is_over:
                pass
            elif isinstance(job, Commit):
                await self._tell(self._intake.dialect.done(job.item))
            else:
                await self._hear(job)
            self._is_hearing = False

    async def _hear(self, window: Window) -> None:
        try:
            await self._transcribe(window)
        except TrioserveError as error:
            window.item.is_over = True
            await self._tell(self._intake.dialect.failed(window.item, describe(error)))

    async def _transcribe(self, window: Window) -> None:
        item, settings = window.item, window.settings
        params = settings.params(item.language)
        async with settings.service.llm.transcribe(Speech(window.samples), params) as stream:
            async for update in stream:
                # Of a window that has ended; until then its text may be thrown away.
                text = item.say("".join(segment.text for segment in update.segments))
                if text and not item.is_over:
                    await self._tell(self._intake.dialect.delta(item, text))
            result = stream.result
        item.language = result.language
        item.num_prompt_tokens += result.num_prompt_tokens
        item.num_generation_tokens += result.num_generation_tokens

    async def _tell(self, event: object | None) -> None:
        if event is not None:
            await self._peer.send(msgspec.json.encode(event).decode())
