"""Responses for which no client waits: a task each, in a nursery of whoever serves the application."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import OverloadedError
from trioserve.nurseries import ungrouped
from trioserve.server.deadlines import RequestDeadline
from trioserve.server.errors import describe, rename, shutting_down
from trioserve.server.generation import Outputs
from trioserve.server.request_scope import App
from trioserve.server.responses.event_log import EventLog
from trioserve.server.responses.keeping import Keeper
from trioserve.server.responses.store import StoreError
from trioserve.server.responses.writer import ResponseWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trioserve.outputs import RequestOutput

__all__ = ["Background", "BackgroundRun", "open_background"]

_logger = logging.getLogger("trioserve.responses")

_LAST_WRITE = 5.0
"""Seconds in which the end of a response is stored, also when everything is cancelled."""


@asynccontextmanager
async def open_background(max_running: int) -> AsyncIterator[Background]:
    """Owns background responses. Leaving it waits for them; `App.end_requests` says how long that takes.
    Cancelling it, or an error in its body, cancels them: they are stored as that."""
    with ungrouped():
        async with trio.open_nursery() as nursery:
            background = Background(nursery, max_running)
            yield background
            background.is_closed = True


@attrs.define(eq=False)
class Background:
    _nursery: trio.Nursery
    _max_running: int
    is_closed: bool = attrs.field(init=False, default=False)
    """No response begins any more."""
    _runs: dict[str, BackgroundRun] = attrs.field(init=False, factory=dict)  # by the response's id
    _became_idle: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    @property
    def num_running(self) -> int:
        return len(self._runs)

    def check_room(self) -> None:
        """Whether another one could begin now. Not a checkpoint.

        Raises:
          OverloadedError: there are too many.
          ApiError: none begins any more (503).
        """
        if self.is_closed:
            raise shutting_down()
        if self.num_running >= self._max_running:
            raise OverloadedError(
                f"The server has {self.num_running} background responses under way; it takes "
                f"{self._max_running} at a time."
            )

    def start(self, run: BackgroundRun) -> None:
        """It runs from now on, and `run.resources` are its own. Not a checkpoint."""
        self._runs[run.id] = run
        self._nursery.start_soon(self._run, run)

    def find(self, owner: str, response_id: str) -> BackgroundRun | None:
        """The response, if it is being made."""
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    async def wait_idle(self) -> None:
        """Until none is left. Always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while self._runs:
            await self._became_idle.park()

    async def _run(self, run: BackgroundRun) -> None:
        try:
            await run.run()
        except Exception:  # as of any request: its siblings go on
            _logger.exception("a background response failed")
        finally:
            del self._runs[run.id]
            run.ended.set()
            if not self._runs:
                self._became_idle.unpark_all()


@attrs.define(eq=False, kw_only=True)
class BackgroundRun:
    """One response, from the submission to its end in the store."""

    app: App
    writer: ResponseWriter
    outputs: Outputs
    keeper: Keeper
    deadline: RequestDeadline
    """Of the response; the request that asked for it has its own."""
    resources: AsyncExitStack
    """What ends its work in the engine and gives back its place."""
    field_names: Mapping[str, str]
    """As for `rename`."""
    log: EventLog = attrs.field(init=False, factory=EventLog)
    has_begun: trio.Event = attrs.field(init=False, factory=trio.Event)
    """It is in the store, as far as it can be written: whoever knows its id finds it, also after a crash."""
    ended: trio.Event = attrs.field(init=False, factory=trio.Event)
    """It is in the store, and its task has nothing more to do."""
    _cancellation: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)

    @property
    def id(self) -> str:
        return self.keeper.response_id

    @property
    def owner(self) -> str:
        return self.keeper.owner

    def cancel(self) -> None:
        """End it; `ended` says when that is through. Nothing, if it has ended by itself. Not a checkpoint."""
        self._cancellation.cancel()

    def discard(self) -> None:
        """End it, and keep nothing of it. Not a checkpoint."""
        self.keeper.forget()
        self.cancel()

    async def run(self) -> None:
        """Cancelled from outside, it is stored as cancelled. Other errors are faults of the program."""
        last: list[bytes] = []
        try:
            with self.app.open_request(self.deadline):
                async with self.resources:
                    await self._keep()
                    self.has_begun.set()
                    last = await self._make()
        except Exception as error:
            last = self.writer.break_off(describe(error))
        finally:
            with trio.move_on_after(_LAST_WRITE, shield=True):
                await self._end(last or self.writer.cancel())

    async def _end(self, last: list[bytes]) -> None:
        self.has_begun.set()
        try:
            await self._keep(self.log, last)
        finally:
            self.log.append(last)
            self.log.close()

    async def _make(self) -> list[bytes]:
        """The response to its end, whichever that is. Returns the last events, which are told once it is in
        the store."""
        with self._cancellation:
            with self.deadline.open_scope():
                return await self._write()
            return self.writer.break_off(describe(self.app.expire(self.deadline)))
        return self.writer.cancel()

    async def _write(self) -> list[bytes]:
        try:
            while True:
                index, output = await self.outputs.next()
                self._record(index, output)
                if output.finished:
                    await self.deadline.lift()
                    return self.writer.finish()
                await self.outputs.forward(self._record)
        except Exception as error:
            rename(error, self.field_names)
            return self.writer.break_off(describe(error))

    def _record(self, _: int, output: RequestOutput) -> bool:
        self.log.append(self.writer.advance(output))
        return True

    async def _keep(self, log: EventLog | None = None, last: Sequence[bytes] = ()) -> None:
        try:
            await self.keeper.keep(self.writer.response, log, last)
        except StoreError as error:
            _logger.error("a response could not be stored: %s", error)
