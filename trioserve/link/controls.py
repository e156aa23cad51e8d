"""What a client may ask of an engine core beside running requests: hold, sleep, forget, drain."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from trioserve.audio_input import AudioInput
from trioserve.link.between_steps import BetweenSteps
from trioserve.link.loaded_adapters import LoadedAdapters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from trioserve.link.service import SteeredCore, SteeredRunner
    from trioserve.link.step_thread import StepThread

__all__ = ["Controls"]

_AWAKE = 0
_TAGS = ("weights", "kv_cache", "scheduling")


class Controls:
    """The methods that `Utility` messages name. Each call runs in a task of its own, and may take long.

    Who holds or releases the engine while another call waits for it to come to rest ends that waiting.
    """

    # Invariant: while any memory is released, the core is held and no step is in flight.

    def __init__(self, core: SteeredCore, thread: StepThread, runner: SteeredRunner, num_blocks: int) -> None:
        self.between_steps = BetweenSteps(core)
        self.sleep_level = _AWAKE
        self.core = core
        self.on_their_way: dict[int, trio.CancelScope] = {}
        """Requests that are not in the core yet, by id, and what ends each one's waiting. A drain waits for
        them, too: `between_steps.notify` is to be called when there is one less."""
        self.adapters = LoadedAdapters(thread, runner)
        self._thread = thread
        self._runner = runner
        self.num_blocks = num_blocks
        self._is_sleeping = False  # at level 0, too, where nothing but the scheduling stops
        self._released: set[str] = set()  # of "weights" and "kv_cache"
        self._memory_lock = trio.Lock()
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "ping": self._ping,
            "drain": self._drain,
            "pause": self._pause,
            "resume": self._resume,
            "is_paused": self._get_is_paused,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "is_sleeping": self._get_is_sleeping,
            "reset_prefix_cache": self._reset_prefix_cache,
            "load_lora": self.adapters.load,
            "unload_lora": self.adapters.unload,
            "align_audio": self._align_audio,
        }

    async def call(self, method: str, args: Sequence[Any]) -> Any:
        """Raises ValueError or TypeError if there is no such method, or it does not take these arguments."""
        if method not in self._methods:
            raise ValueError(f"there is no method {method!r}")
        return await self._methods[method](*args)

    async def _ping(self) -> bool:
        return True

    async def _drain(self) -> None:
        """Wait until there is no request at all."""
        await self.between_steps.wait_until(lambda: not self.core.has_work and not self.on_their_way)

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        """Requests keep coming in and wait. Those that have begun: "keep" freezes them where they are, and
        "wait" lets them end; for "abort" the client has aborted them, and it is waited for all the same."""
        if mode not in {"abort", "wait", "keep"}:
            raise ValueError(f"mode must be abort, wait or keep, got {mode!r}")
        self.core.hold(new_only=mode != "keep")
        if mode == "keep":
            await self.between_steps.do(lambda: None)
        else:
            await self.between_steps.wait_until(lambda: not self.core.num_begun or not self.core.is_held)
        if clear_cache and self.core.is_held:
            await self._reset_prefix_cache(preempt_running=True)

    async def _resume(self) -> None:
        if self._released:
            raise ValueError(f"asleep: wake_up first ({' and '.join(sorted(self._released))} released)")
        self._is_sleeping = False
        self.core.release()
        self.between_steps.notify()

    async def _get_is_paused(self) -> bool:
        return self.core.is_held

    async def _sleep(self, level: int, mode: str) -> None:
        """0: as `_pause`; 1: the KV cache's memory is given back too; 2: and that of the weights."""
        if level not in {0, 1, 2}:
            raise ValueError(f"level must be 0, 1 or 2, got {level!r}")
        async with self._memory_lock:
            await self._pause(mode, level > 0)
            if not self.core.is_held:
                return  # somebody resumed
            self._is_sleeping = True
            if level > 0:
                await self._release("kv_cache", self._runner.free_kv_cache)
            if level > 1:
                await self._release("weights", self._runner.free_weights)

    async def _release(self, what: str, free: Callable[[], None]) -> None:
        if what not in self._released:
            await self.between_steps.do(partial(self._freeze, what))
            await self._thread.run(free)
            self.sleep_level = 2 if "weights" in self._released else 1

    def _freeze(self, what: str) -> None:
        """All at once: somebody may have resumed up to now, and from now on nobody can."""
        self._released.add(what)
        self.core.hold(new_only=False)
        self.core.reset_prefix_cache(preempt_running=True)

    async def _wake_up(self, tags: Sequence[str] | None) -> None:
        """Bring back what `tags` name (None: everything). Scheduling goes on once all memory is there."""
        wanted = _TAGS if tags is None else tags
        if unknown := sorted(set(wanted) - set(_TAGS)):
            raise ValueError(f"tags must be among {', '.join(_TAGS)}, got {', '.join(map(repr, unknown))}")
        async with self._memory_lock:
            if "weights" in wanted:
                await self._bring_back("weights", self._runner.load_weights)
            if "kv_cache" in wanted:
                await self._bring_back("kv_cache", self._runner.allocate_kv_cache, self.num_blocks)
            if not self._released:
                await self._resume()

    async def _bring_back(self, what: str, load: Callable[..., None], *args: object) -> None:
        if what in self._released:
            await self._thread.run(load, *args)
            self._released.remove(what)
            self.sleep_level = 2 if "weights" in self._released else len(self._released)

    async def _get_is_sleeping(self) -> bool:
        return self._is_sleeping

    async def _align_audio(
        self, digest: str, samples: bytes, token_ids: list[int], num_prompt_tokens: int
    ) -> list[float]:
        """When each token from `num_prompt_tokens` on was said; see `ModelRunner.align_audio`."""
        audio = AudioInput(digest=digest, samples=samples)
        return await self._thread.run(self._runner.align_audio, audio, token_ids, num_prompt_tokens)

    async def _reset_prefix_cache(self, preempt_running: bool) -> bool:
        if not preempt_running:
            return self.core.reset_prefix_cache()
        return await self.between_steps.do(lambda: self.core.reset_prefix_cache(preempt_running=True))
