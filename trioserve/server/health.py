"""GET /health, /health/ready, /health/live and /ping, for load balancers and supervisors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    from typing import Self

    from quart import Response

    from trioserve.server.served_models import ServedModels

__all__ = ["Health"]

_PAUSE = 0.25
"""Seconds between two pings of which the first was not answered: they wait in the engine's socket."""


class _State(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    NOT_ANSWERING = "not_answering"
    DOWN = "down"


@attrs.frozen(eq=False)
class Health:
    """Answers by a round trip to each engine core, which replies also while a step runs.

    Each asker waits `timeout` seconds at most. It takes no place of a request, and needs no task beside those
    that ask.
    """

    _engines: Sequence[_EngineHealth]
    _timeout: float
    _is_draining: Callable[[], bool]

    @classmethod
    def of(cls, models: ServedModels, timeout: float, is_draining: Callable[[], bool]) -> Self:
        engines = [_EngineHealth(service.llm, service.model_names[0]) for service in models.services]
        return cls(engines, timeout, is_draining)

    async def check(self) -> Response:
        """200 if every engine core answers, 503 if one is gone, restarting or stuck; no body either way."""
        return empty_reply(503 if await self._ill() else 200)

    async def ready(self) -> Response:
        """As `check`, but 503 also while the server drains; the error's code says why, and of several models
        its message says which.

        Raises:
          ApiError: it is not ready (503).
        """
        if self._is_draining():
            raise not_ready(_State.DRAINING)
        if ill := await self._ill():
            (_, state), *_ = ill
            names = [name for name, of_this in ill if of_this is state]
            raise not_ready(state, names if len(self._engines) > 1 else ())
        return empty_reply(200)

    async def live(self) -> Response:
        """200 unless an engine core is dead for good: only a new process helps then. Asks nobody."""
        return empty_reply(503 if any(engine.llm.errored for engine in self._engines) else 200)

    async def _ill(self) -> list[tuple[str, _State]]:
        """The models that are not ready. Their engines are asked side by side."""
        states = dict.fromkeys(self._engines, _State.NOT_ANSWERING)

        async def ask(engine: _EngineHealth) -> None:
            states[engine] = await engine.ask()

        with trio.move_on_after(self._timeout):
            async with trio.open_nursery() as nursery:
                for engine in self._engines:
                    nursery.start_soon(ask, engine)
        return [(engine.name, state) for engine, state in states.items() if state is not _State.READY]


@attrs.define(eq=False)
class _EngineHealth:
    """However many ask, one round trip is under way at a time."""

    llm: AsyncLLM
    name: str
    _round_trip: SingleFlight[_State] = attrs.field(init=False)
    _next_ping: float = attrs.field(init=False, default=-math.inf)

    def __attrs_post_init__(self) -> None:
        self._round_trip = SingleFlight(self._ping)

    async def ask(self) -> _State:
        return await self._round_trip.run()

    async def _ping(self) -> _State:
        await trio.sleep_until(self._next_ping)
        self._next_ping = trio.current_time() + _PAUSE
        try:
            await self.llm.check_health()
        except EngineRestartingError:
            state = _State.RESTARTING
        except TrioserveError:
            state = _State.DOWN
        else:
            state = _State.READY
        self._next_ping = -math.inf
        return state
