"""Sending a body whose source may be silent for long: then a comment shows that the stream is alive."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import trio

from trioserve.server.framing import KEEP_ALIVE

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Awaitable, Callable

    from trioserve.server.request_stream import SendNow, Unsent

    Forward = Callable[[Callable[[bytes], bool]], Awaitable[None]]

__all__ = ["KeepAliveSender"]


class KeepAliveSender:
    """Sends frames as they come, and a comment after each interval in which none was sent.

    Two tasks work on it: one sends the frames; the other one, which is there anyway to wait for the client's
    leaving, looks at the time of the last frame. So a frame costs a look at the clock and no scope, a stream
    no task of its own, and the wait for a frame is never interrupted: nothing is lost or changes places.

    The two take turns. A comment is sent only while the source is waited for, and what the source gives
    meanwhile is sent after the comment is through. So the transport is never given two parts at a time.
    """

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        interval: float,
        send_now: SendNow | None = None,
    ) -> None:
        """`interval` in seconds; infinity: no comments. `send_now` is what the server may have besides."""
        self._send = send
        self._send_now = send_now
        self._unsent: Unsent | None = None  # of the last frame, from when it was sent in part to when it is
        self._interval = interval
        self._now = trio.lowlevel.current_clock().current_time  # `trio.current_time`, without looking for it
        self._begun = False
        self._silent_since = math.inf  # of trio's clock; infinity while a frame is sent, or none has been yet
        self._comment_sent: trio.Event | None = None  # while a comment is on its way
        self._waiting = trio.CancelScope()  # around what the watching task waits for

    async def send_all(self, frames: AsyncIterable[bytes], forward: Forward | None = None) -> None:
        """Send every frame. `forward`, if the source has it, is as in `ForwardingSource`."""
        self._begun = True
        self._waiting.deadline = self._next_look()
        async for frame in frames:
            await self.send(frame)
            if forward is not None and self._send_now is not None:
                await self._forward(forward)
        await self._take_over()

    async def _forward(self, forward: Forward) -> None:
        """Send frames as they come, without this task's being woken for it, as far as that goes."""
        await forward(self._try_now)
        if self._unsent is not None:
            unsent, self._unsent = self._unsent, None
            await unsent()
            self._silent_since = trio.current_time()

    def _try_now(self, frame: bytes) -> bool:
        assert self._send_now is not None
        self._silent_since = math.inf
        if self._comment_sent is not None:
            self._unsent = partial(self.send_last, frame)
            return False
        self._unsent = self._send_now(frame)
        if self._unsent is not None:
            return False
        self._silent_since = self._now()
        return True

    async def send(self, frame: bytes) -> None:
        """Send one frame."""
        await self.send_last(frame)
        self._silent_since = trio.current_time()

    async def send_last(self, frame: bytes) -> None:
        """Send one frame, which no comment follows."""
        await self._take_over()
        await self._send(frame)

    async def watch(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Send comments when they are due, until `wait` returns. That is cancelled and called again for each
        look at the clock, so it must lose nothing by that."""
        while True:
            with trio.CancelScope(deadline=self._next_look()) as self._waiting:
                await wait()
                return
            if trio.current_time() >= self._silent_since + self._interval:
                await self._send_comment()

    def _next_look(self) -> float:
        if not self._begun:
            return math.inf
        return min(self._silent_since, trio.current_time()) + self._interval

    async def _take_over(self) -> None:
        """Let no comment begin, and the one that is on its way arrive. A checkpoint only if there is one."""
        self._silent_since = math.inf
        if self._comment_sent is not None:  # cut in the middle, it would spoil the connection
            await self._comment_sent.wait()

    async def _send_comment(self) -> None:
        self._comment_sent = sent = trio.Event()
        await self._send(KEEP_ALIVE)
        self._comment_sent = None
        sent.set()
        if self._silent_since != math.inf:
            self._silent_since = trio.current_time()
