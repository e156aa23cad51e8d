"""One client that speaks, and what it is told of what was heard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum, auto

import attrs
import msgspec
import numpy as np
import trio
from numpy.typing import NDArray

from trioserve.audio.live import LiveWindows, Pcm16Decoder
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
from trioserve.server.realtime.dialects import OpenAIDialect, VllmDialect
from trioserve.server.realtime.item import Item
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


@attrs.frozen
class _Window:
    """To be heard."""

    item: Item
    samples: NDArray[np.float32]
    settings: SessionSettings


@attrs.frozen
class _Commit:
    """All of an item was heard."""

    item: Item


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
        self._settings = settings
        self._draining = draining
        self._idle_timeout = idle_timeout
        self._max_json_depth = max_json_depth
        self._dialect: VllmDialect | OpenAIDialect = OpenAIDialect() if settings.is_openai else VllmDialect()
        self._windows = LiveWindows()
        self._decoder = Pcm16Decoder(settings.rate)
        self._item = Item()
        self._previous: Item | None = None
        self._unsent: list[_Window | _Commit] = []
        self._to_hear, self._jobs = trio.open_memory_channel[_Window | _Commit](_MAX_JOBS)
        self._is_hearing = False
        self._listening = trio.CancelScope()
        self._reading = reading

    async def run(self) -> Ending:
        """Until the client leaves, which cancels this; until the server drains, when what was said by then is
        still heard; or until the session is idle for too long."""
        await self._tell(self._settings.created())
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
            if self._item.seconds:
                await self._commit()
            await self._deliver()
        return ending

    # What the client says

    async def _listen(self) -> None:
        """Until the client is idle."""
        while (message := await self._next_message()) is not None:
            try:
                await self._take(await self._read(message))
            except EventError as error:
                await self._tell(self._dialect.error(error))

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
                await self._update(event)
            case AudioAppend():
                await self._append(event)
            case AudioCommit():
                await self._take_commit(event)
            case AudioClear():
                await self._clear()

    async def _update(self, event: SessionUpdate) -> None:
        settings = self._settings.updated(event)
        if event.session is not None:
            self._dialect = OpenAIDialect()
        if settings.rate != self._settings.rate:
            self._cut(self._decoder.finish())
            self._decoder = Pcm16Decoder(settings.rate)
        self._settings = settings
        await self._deliver()
        await self._tell(self._dialect.updated(settings.state()))

    async def _append(self, event: AudioAppend) -> None:
        self._check_ready(event)
        if len(event.audio) < _LARGE_EVENT:
            self._take_audio(event)
        else:
            await trio.to_thread.run_sync(self._take_audio, event, limiter=self._reading)
        await self._deliver()

    def _take_audio(self, event: AudioAppend) -> None:
        data = event.samples()
        self._item.seconds += len(data) / 2 / self._settings.rate
        self._cut(self._decoder.decode(data))

    async def _take_commit(self, event: AudioCommit) -> None:
        self._check_ready(event)
        if isinstance(self._dialect, OpenAIDialect):
            if not self._item.seconds:
                message = "There is no audio to commit."
                raise EventError("input_audio_buffer_commit_empty", message, None, event.event_id)
            await self._tell(self._dialect.committed(self._item, self._previous))
            await self._commit()
        elif event.final:
            await self._commit()
        else:
            self._cut_rest()
            await self._deliver()

    async def _clear(self) -> None:
        self._item.is_over = True
        self._item = Item()
        self._windows.clear()
        self._decoder = Pcm16Decoder(self._settings.rate)
        await self._tell(self._dialect.cleared())

    def _check_ready(self, event: AudioAppend | AudioCommit) -> None:
        if self._dialect.needs_model and not self._settings.is_model_said:
            message = "The model must be said first, by a session.update."
            raise EventError("model_not_validated", message, "model", event.event_id)

    # From samples to windows

    def _cut(self, samples: NDArray[np.float32]) -> None:
        self._unsent += [
            _Window(self._item, window, self._settings) for window in self._windows.push(samples)
        ]

    def _cut_rest(self) -> None:
        self._cut(self._decoder.finish())
        self._unsent += [_Window(self._item, window, self._settings) for window in self._windows.finish()]

    async def _commit(self) -> None:
        """End the item, and begin another one."""
        self._cut_rest()
        self._unsent.append(_Commit(self._item))
        self._previous, self._item = self._item, Item()
        await self._deliver()

    async def _deliver(self) -> None:
        """Hand over what is to be heard. What a cancellation leaves is handed over the next time."""
        while self._unsent:
            await self._to_hear.send(self._unsent[0])
            del self._unsent[0]

    # From windows to text

    async def _hear_all(self) -> None:
        async for job in self._jobs:
            self._is_hearing = True
            if job.item.is_over:
                pass
            elif isinstance(job, _Commit):
                await self._tell(self._dialect.done(job.item))
            else:
                await self._hear(job)
            self._is_hearing = False

    async def _hear(self, window: _Window) -> None:
        try:
            await self._transcribe(window)
        except TrioserveError as error:
            window.item.is_over = True
            await self._tell(self._dialect.failed(window.item, describe(error)))

    async def _transcribe(self, window: _Window) -> None:
        item, settings = window.item, window.settings
        params = settings.params(item.language)
        async with settings.service.llm.transcribe(Speech(window.samples), params) as stream:
            async for update in stream:
                # Of a window that has ended; until then its text may be thrown away.
                text = item.say("".join(segment.text for segment in update.segments))
                if text and not item.is_over:
                    await self._tell(self._dialect.delta(item, text))
            result = stream.result
        item.language = result.language
        item.num_prompt_tokens += result.num_prompt_tokens
        item.num_generation_tokens += result.num_generation_tokens

    async def _tell(self, event: object | None) -> None:
        if event is not None:
            await self._peer.send(msgspec.json.encode(event).decode())
