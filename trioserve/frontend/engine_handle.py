"""What concerns an AsyncLLM's engine, and none of its requests alone: its state, and steering it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.frontend.control import EngineControl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trioserve.errors import EngineDeadError
    from trioserve.frontend.control import PauseMode, WakeTag
    from trioserve.frontend.engine_slot import EngineSlot

__all__ = ["EngineHandle"]


class EngineHandle:
    """The base of `AsyncLLM`."""

    def __init__(self, slot: EngineSlot, abort_all: Callable[[], None]) -> None:
        """`abort_all` ends every request; it is not called before there is a core in `slot`."""
        self._engine = slot
        self._control = EngineControl(slot.get_client, abort_all)

    # State

    @property
    def is_running(self) -> bool:
        """Open, and the engine core alive."""
        return self._engine.is_serving

    @property
    def errored(self) -> bool:
        """The engine core has died, and there will be no other."""
        return self._engine.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._engine.dead_error

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine core has died for good; never returns if it does not."""
        return await self._engine.wait_dead()

    async def wait_ready(self) -> None:
        """Wait while the engine core is being restarted; at other times only a checkpoint.

        Raises:
          EngineDeadError: it is gone for good.
          ClosedError: the AsyncLLM is not open, or is closed meanwhile.
        """
        await self._engine.wait_ready()

    async def check_health(self) -> None:
        """A round trip to the engine core.

        Raises:
          EngineDeadError: it is gone.
          EngineRestartingError: it is gone, and the next one is not ready.
        """
        await self._engine.get_client().call("ping")

    # Steering: see `EngineControl` for details, and for what these raise

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. False, and nothing done, while requests run (unless they are reset)."""
        return await self._control.reset_prefix_cache(reset_running_requests)

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Compute nothing until `resume_generation`. Running requests: "abort", "wait" for or "keep" them."""
        await self._control.pause(mode, clear_cache)

    async def resume_generation(self) -> None:
        """Go on with what was kept and what has come meanwhile."""
        await self._control.resume()

    async def is_paused(self) -> bool:
        return await self._control.is_paused()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and give memory back: with level 1 the KV cache's, with level 2 that of the weights too."""
        await self._control.sleep(level, mode)

    async def wake_up(self, tags: Iterable[WakeTag] | None = None) -> None:
        """Take back what `sleep` gave away: all, or "weights", "kv_cache", "scheduling"."""
        await self._control.wake_up(tags)

    async def is_sleeping(self) -> bool:
        return await self._control.is_sleeping()

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until the engine has no request. Raises TimeoutError after `drain_timeout` seconds."""
        await self._control.drain(drain_timeout)
