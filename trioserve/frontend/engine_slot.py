"""Where an AsyncLLM's engine core is, or why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve.errors import ClosedError, EngineDeadError, EngineRestartingError

if TYPE_CHECKING:
    from trioserve.link.client import EngineCoreClient

__all__ = ["EngineSlot"]

_SOON = 1.0
"""Seconds that are told where a start takes longer than the one before did."""


class EngineSlot:
    """What everybody may ask about the engine core. `EngineSupervisor` alone says what is so.

    Everything is synchronous, but for the two that wait.
    """

    # The states, the fields that are set in each, and what `get_client` does:
    #
    #                    _client  _death  _dead_error
    #   new                                             raises ClosedError
    #   serving             x                           returns it
    #   restarting                   x                  raises EngineRestartingError
    #   dead for good                x         x        raises EngineDeadError
    #   closed                                          raises ClosedError
    #
    #   new ─▶ serving ◀─▶ restarting ─▶ dead for good;  serving ─▶ dead for good;  any ─▶ closed, but what is
    #   restarting when it is closed is dead for good, and what is dead for good stays so.

    def __init__(self) -> None:
        self._client: EngineCoreClient | None = None
        self._death: EngineDeadError | None = None
        self._dead_error: EngineDeadError | None = None
        self._not_open = ClosedError("The AsyncLLM is not open: use it inside `async with`.")
        self._is_closed = False
        self._ready_at = 0.0  # of trio's clock, a guess; for restarting
        self._died = trio.Event()  # set once _dead_error says all that there is to say
        self._changes = trio.lowlevel.ParkingLot()

    @property
    def is_serving(self) -> bool:
        return self._client is not None

    @property
    def has_lost_core(self) -> bool:
        """There was a core, which has died, and there is none in its place."""
        return self._death is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Set once there is no core, and will be none."""
        return self._dead_error

    def get_client(self) -> EngineCoreClient:
        """The core that serves.

        Raises:
          EngineRestartingError: it has died, and the next one is not ready.
          EngineDeadError: it has died, and there is no next one.
          ClosedError: the AsyncLLM is not open.
        """
        if self._client is not None:
            return self._client
        if self._dead_error is not None:
            raise EngineDeadError(*self._dead_error.args)
        if self._death is not None:
            raise EngineRestartingError(
                "The engine is being restarted.",
                retry_after=max(self._ready_at - trio.current_time(), _SOON),
            )
        raise ClosedError(*self._not_open.args)

    async def wait_dead(self) -> EngineDeadError:
        await self._died.wait()
        assert self._dead_error is not None
        return self._dead_error

    async def wait_ready(self) -> None:
        """Wait while a core is being restarted. Always a checkpoint. Raises as `get_client` in other states,
        and returns while one serves."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                self.get_client()
            except EngineRestartingError:
                await self._changes.park()
            else:
                return

    # For the supervisor

    def occupy(self, client: EngineCoreClient) -> None:
        """This core serves from now on."""
        self._client, self._death = client, None
        self._changes.unpark_all()

    def lose(self, error: EngineDeadError, ready_at: float | None) -> None:
        """The core serves no more, or did not start; the next one may at `ready_at`, or there will be none.
        Whoever waits for a call hears `error`."""
        if self._client is not None:
            self._client.end(error)
        self._client, self._death = None, error
        if ready_at is None:
            self._dead_error = error
        else:
            self._ready_at = ready_at

    def bury(self, error: EngineDeadError) -> None:
        """There will be no other core, and `error` is what is to be known about the last one."""
        self._death = self._dead_error = error
        self._died.set()
        self._changes.unpark_all()

    def close(self, error: ClosedError) -> None:
        """No core is to be had from here on. The first close counts."""
        if self._is_closed:
            return
        self._is_closed, self._not_open = True, error
        if self._client is not None:
            self._client.end(error)
            self._client = None
        if self._death is not None:
            self.bury(self._death)
        self._changes.unpark_all()
