"""GET /health, /health/ready, /health/live and /ping, for load balancers and supervisors."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.async_llm import AsyncLLM
from trioserve.errors import EngineRestartingError, TrioserveError
from trioserve.server.errors import not_ready
from trioserve.server.replies import empty_reply
from trioserve.server.single_flight import SingleFlight

if TYPE_CHECKING:
    from quart import Response

__all__ = ["Health"]

_PAUSE = 0.25
"""Seconds between two pings of which the first was not answered: they wait in the engine's socket."""


class _State(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    NOT_ANSWERING = "not_answering"
    DOWN = "down"


@attrs.define(eq=False)
class Health:
    """Answers by a round trip to the engine core, which replies also while a step runs.

    However many ask, one round trip is under way at a time, and each asker waits `timeout` seconds at most.
    It takes no place of a request, and needs no task beside those that ask.
    """

    _llm: AsyncLLM
    _timeout: float
    _is_draining: Callable[[], bool]
    _round_trip: SingleFlight[_State] = attrs.field(init=False)
    _next_ping: float = attrs.field(init=False, default=-math.inf)

    def __attrs_post_init__(self) -> None:
        self._round_trip = SingleFlight(self._ping)

    async def check(self) -> Response:
        """200 if the engine core answers, 503 if it is gone, restarting or stuck; no body either way."""
        return empty_reply(200 if await self._ask() is _State.READY else 503)

    async def ready(self) -> Response:
        """As `check`, but 503 also while the server drains; the error's code says why.

        Raises:
          ApiError: it is not ready (503).
        """
        state = _State.DRAINING if self._is_draining() else await self._ask()
        if state is not _State.READY:
            raise not_ready(state)
        return empty_reply(200)

    async def live(self) -> Response:
        """200 unless the engine core is dead for good: only a new process helps then. Asks nobody."""
        return empty_reply(503 if self._llm.errored else 200)

    async def _ask(self) -> _State:
        with trio.move_on_after(self._timeout):
            return await self._round_trip.run()
        return _State.NOT_ANSWERING

    async def _ping(self) -> _State:
        await trio.sleep_until(self._next_ping)
        self._next_ping = trio.current_time() + _PAUSE
        try:
            await self._llm.check_health()
        except EngineRestartingError:
            state = _State.RESTARTING
        except TrioserveError:
            state = _State.DOWN
        else:
            state = _State.READY
        self._next_ping = -math.inf
        return state
