"""Steering an engine as a whole: hold, sleep, forget, drain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import trio

from trioserve.errors import InvalidRequestError
from trioserve.frontend.arguments import names_of
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trioserve.link.client import EngineCoreClient

__all__ = ["EngineControl", "PauseMode", "WakeTag"]

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests under way. abort: they end, with finish reason "abort". wait: they run to their
end first. keep: they stop where they are, and go on when the engine does."""

WakeTag = Literal["weights", "kv_cache", "scheduling"]

_LEVELS = (0, 1, 2)


class EngineControl:
    """The methods of `AsyncLLM` that concern all requests; each is one call of the engine core.

    Every one raises EngineDeadError or ClosedError where there is no engine (any more), EngineGenerateError
    if the core cannot do it, and InvalidRequestError, naming the argument, if it is wrong.
    Cancelling one does not undo it: the core goes on with what it was told.
    """

    def __init__(self, get_client: Callable[[], EngineCoreClient], abort_all: Callable[[], None]) -> None:
        self._get_client = get_client
        self._abort_all = abort_all

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """Forget all cached prefixes. False, and nothing done, while requests hold blocks; with
        `reset_running_requests` these are preempted first, and computed anew."""
        _check_boolean("reset_running_requests", reset_running_requests)
        return bool(await self._call("reset_prefix_cache", reset_running_requests))

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Compute nothing more until `resume`; new requests queue up meanwhile. Returns when it is so."""
        _check_boolean("clear_cache", clear_cache)
        self._begin_pause(mode)
        await self._call("pause", mode, clear_cache)

    async def resume(self) -> None:
        await self._call("resume")

    async def is_paused(self) -> bool:
        return bool(await self._call("is_paused"))

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, and give memory back until `wake_up`: 0: none; 1: the KV cache; 2: the weights, too."""
        if isinstance(level, bool) or level not in _LEVELS:
            raise _wrong("level", level, _LEVELS)
        self._begin_pause(mode)
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: Iterable[WakeTag] | None) -> None:
        """Take back what `sleep` gave away. None: all of it, and go on with the requests."""
        chosen = None if tags is None else names_of("tags", tags)
        for tag in chosen or ():
            if tag not in get_args(WakeTag):
                raise _wrong("tags", tag, get_args(WakeTag))
        await self._call("wake_up", chosen)

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def drain(self, drain_timeout: float) -> None:
        """Wait until no request is left in the core.

        Raises:
          TimeoutError: some are, after `drain_timeout` seconds.
        """
        _check_seconds("drain_timeout", drain_timeout)
        try:
            with trio.fail_after(drain_timeout):
                await self._call("drain")
        except trio.TooSlowError:
            raise TimeoutError(f"The engine still has requests after {drain_timeout:g} seconds.") from None

    def _begin_pause(self, mode: str) -> None:
        if mode not in get_args(PauseMode):
            raise _wrong("mode", mode, get_args(PauseMode))
        if mode == "abort":
            self._get_client()
            self._abort_all()  # and no checkpoint until the core's message is out, so none can slip in

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._get_client().call(method, *args)


def _check_boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _wrong(name, value, (True, False))


def _check_seconds(name: str, value: object) -> None:
    try:
        is_right = isinstance(value, int | float) and not isinstance(value, bool) and float(value) >= 0
    except OverflowError:  # an integer beyond all floats
        is_right = False
    if not is_right:
        raise InvalidRequestError(
            f"{name} must be a number of seconds, at least 0, got {shown(value)}.", parameter=name
        )


def _wrong(name: str, value: object, allowed: Iterable[object]) -> InvalidRequestError:
    choices = ", ".join(str(choice) for choice in allowed)
    return InvalidRequestError(f"{name} must be one of {choices}, got {shown(value)}.", parameter=name)
