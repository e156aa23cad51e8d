"""The ASGI lifespan: the application's start and end around the time it is served."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio
from hypercorn.typing import AppWrapper
from hypercorn.utils import LifespanFailureError, LifespanTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hypercorn.typing import ASGIReceiveEvent, ASGISendEvent

__all__ = ["open_lifespan"]


@asynccontextmanager
async def open_lifespan(
    app: AppWrapper, state: dict[str, Any], shutdown_timeout: float
) -> AsyncIterator[None]:
    """Start `app`, and shut it down at the end; `state` is what it shares with its requests.

    The application's lifespan task lives in a nursery here. When the body is cancelled or fails, it is
    cancelled and gets no shutdown message.

    Raises (in an exception group):
      LifespanFailureError: the application says that its start or its shutdown failed.
      LifespanTimeoutError: the shutdown took longer than `shutdown_timeout` seconds.
      Exception: whatever the application's lifespan task raises, also while requests are served. One that
        raises before it receives anything does not know the lifespan protocol, and is served without.
    """
    lifespan = _Lifespan(app, state)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifespan.run)
        await lifespan.started.wait()
        yield
        await lifespan.shutdown(within=shutdown_timeout)
        nursery.cancel_scope.cancel()


@attrs.define(eq=False)
class _Lifespan:
    _app: AppWrapper
    _state: dict[str, Any]
    _shutting_down: trio.Event = attrs.field(factory=trio.Event)
    started: trio.Event = attrs.field(factory=trio.Event)
    _stopped: trio.Event = attrs.field(factory=trio.Event)
    _num_received: int = 0

    async def run(self) -> None:
        try:
            await self._app(
                {"type": "lifespan", "asgi": {"spec_version": "2.0", "version": "3.0"}, "state": self._state},
                self._receive,
                self._send,
                trio.to_thread.run_sync,
                trio.from_thread.run,
            )
        except Exception:
            if self._num_received:
                raise
        finally:
            self.started.set()
            self._stopped.set()

    async def shutdown(self, *, within: float) -> None:
        self._shutting_down.set()
        try:
            with trio.fail_after(within):
                await self._stopped.wait()
        except trio.TooSlowError as error:
            raise LifespanTimeoutError("shutdown") from error

    async def _receive(self) -> ASGIReceiveEvent:
        self._num_received += 1
        if self._num_received == 1:
            return {"type": "lifespan.startup"}
        await self._shutting_down.wait()
        return {"type": "lifespan.shutdown"}

    async def _send(self, message: ASGISendEvent) -> None:
        match message["type"]:
            case "lifespan.startup.complete":
                self.started.set()
            case "lifespan.shutdown.complete":
                self._stopped.set()
            case "lifespan.startup.failed":
                raise LifespanFailureError("startup", message.get("message", ""))
            case "lifespan.shutdown.failed":
                raise LifespanFailureError("shutdown", message.get("message", ""))
            case other:
                raise ValueError(f"not a message of the lifespan protocol: {other!r}")
