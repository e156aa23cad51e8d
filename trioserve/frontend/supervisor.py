"""The engine core's life, and what follows its death."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import attrs
import trio

from trioserve.config import SupervisionConfig
from trioserve.errors import ClosedError, EngineDeadError, EngineStartError
from trioserve.frontend.engine_slot import EngineSlot
from trioserve.frontend.output_processor import OutputProcessor
from trioserve.frontend.requests import Requests
from trioserve.link.client import EngineCoreClient
from trioserve.link.messages import MessageError, Ready
from trioserve.link.watchdog import wait_for_silence
from trioserve.nurseries import ungrouped
from trioserve.observability.metrics import EngineMetrics

__all__ = ["EngineSupervisor"]

log = logging.getLogger(__name__)

_GOOD_SERVICE = 600.0
"""Seconds of service after which a death begins a new row of restarts."""

_LONGEST_BACKOFF = 60.0
"""Seconds between a failure and the next start, at most."""


@attrs.define(eq=False, kw_only=True)
class EngineSupervisor:
    """The task that owns the engine core: its process, the reading of its link, its watchdog, its successor.

        start ─▶ serve ─▶ death ─▶ reap ─▶ fail the requests ─▶ wait ─▶ start ─▶ ...
                            │ restart "never", or as many in a row as are allowed
                            ▼
                        dead for good

    A core lives in a scope (`open_core`) inside this task, so wherever a cancellation strikes (serving, half
    started, dying, waiting), the scope ends the process, and closing never waits for a start. What the slot
    says changes before the requests hear of it: who tries again at once is told to wait.

    A new core is as empty as the first one was: nothing of a prefix cache, a pause or a sleep is left.
    """

    config: SupervisionConfig
    slot: EngineSlot
    metrics: EngineMetrics
    outputs: OutputProcessor
    get_requests: Callable[[], Requests]
    """Works once `open_core` has been entered."""
    open_core: Callable[[], AbstractAsyncContextManager[EngineCoreClient]]
    """Its scope owns a core, which is ready inside it. Raises EngineStartError on entering."""

    _restarts: int = attrs.field(default=0, init=False)
    """In a row: 0 up to the first death, and after a death that followed a good service; at most
    config.restart_limit."""
    _start_seconds: float = attrs.field(default=0.0, init=False)
    """How long the newest core took to be ready."""
    _core: EngineCoreClient | None = attrs.field(default=None, init=False)
    """The newest. Its process may be gone."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled, or dead for good. Started once the first core is ready.

        Raises:
          EngineStartError: the first core did not come up.
        """
        try:
            delay = await self._run_core(task_status.started)
            while delay is not None:
                await trio.sleep(delay)
                try:
                    delay = await self._run_core(self.get_requests().resubmit)
                except EngineStartError as error:
                    delay = self._fail_start(error)
        finally:
            self._notice_late_death()
            self.close(ClosedError("The AsyncLLM was closed."))

    def close(self, error: ClosedError) -> None:
        """Fail what is under way, and everything new. Not a checkpoint; the core itself ends with `run`."""
        self.slot.close(error)
        if self._core is not None:  # else there are no requests yet
            self.get_requests().end_of_engine(error, requeue=False)

    @property
    def ready(self) -> Ready:
        """What the newest core reported."""
        assert self._core is not None, "ask once `run` has started"
        return self._core.ready

    # A core

    async def _run_core(self, on_ready: Callable[[], None]) -> float | None:
        """From its start to its death. Returns the seconds until the next start, or None if there is none."""
        started = trio.current_time()
        with ungrouped():
            async with self.open_core() as client:
                ready_at = trio.current_time()
                self._start_seconds = ready_at - started
                self.metrics.record_ready(is_restart=self._core is not None)
                self._core = client
                self.slot.occupy(client)
                _log_ready(self.metrics.model_name, client)
                on_ready()
                error = await self._serve(client)
                delay = self._delay(trio.current_time() - ready_at)
                self._lose(error, delay)
                try:
                    if (ending := await client.reap()) is not None:
                        error = EngineDeadError(f"{error} ({ending})")
                finally:  # it has died, whoever is leaving meanwhile
                    self._tell(error, delay)
        return delay

    async def _serve(self, client: EngineCoreClient) -> EngineDeadError:
        """Until its death is found, in one way or another: the first one counts."""
        deaths: list[EngineDeadError] = []

        async def find(way: Callable[[EngineCoreClient], Awaitable[EngineDeadError]]) -> None:
            deaths.append(await way(client))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(find, self._read)
            nursery.start_soon(find, self._watch)
        return deaths[0]

    async def _read(self, client: EngineCoreClient) -> EngineDeadError:
        """The one task that reads the link. It waits for nothing but the socket."""
        try:
            while True:
                client.abort(self.outputs.process(await client.receive()))
                await trio.lowlevel.checkpoint()  # stay fair when the socket always has more
        except EngineDeadError as error:
            return error
        except MessageError as error:
            return EngineDeadError(f"The engine core sent something unreadable: {error}")

    async def _watch(self, client: EngineCoreClient) -> EngineDeadError:
        await wait_for_silence(client, self.config.step_timeout)
        return EngineDeadError(
            f"The engine core has not answered for {self.config.step_timeout:g} seconds (--step-timeout)."
        )

    # Its death

    def _delay(self, seconds_served: float) -> float | None:
        """Seconds until the next start; None if there will be none."""
        if seconds_served >= _GOOD_SERVICE:
            self._restarts = 0
        if self.config.restart == "never" or self._restarts >= self.config.restart_limit:
            return None
        self._restarts += 1
        doublings = min(self._restarts - 1, 30)  # past the longest, whatever it is a multiple of
        return min(self.config.restart_backoff * 2.0**doublings, _LONGEST_BACKOFF)

    def _lose(self, error: EngineDeadError, delay: float | None) -> None:
        """From here on nobody gets this core, and nothing of it is counted."""
        ready_at = None if delay is None else trio.current_time() + delay + self._start_seconds
        self.slot.lose(error, ready_at)
        self.metrics.record_death()

    def _tell(self, error: EngineDeadError, delay: float | None) -> None:
        """The death to everybody whom it concerns."""
        log.error("%s: %s", self.metrics.model_name, error)
        if delay is None:
            self.slot.bury(error)
        else:
            limit = self.config.restart_limit
            name = self.metrics.model_name
            log.warning("%s: restart %d of %d in %.1f s", name, self._restarts, limit, delay)
        self.get_requests().end_of_engine(error, requeue=self.config.requeue and delay is not None)

    def _fail_start(self, error: EngineStartError) -> float | None:
        """A start that fails is a death too; what was requeued waits for the next start, if there is one."""
        death = EngineDeadError(f"The engine core could not be restarted: {error}")
        delay = self._delay(0.0)
        self._lose(death, delay)
        self._tell(death, delay)
        return delay

    def _notice_late_death(self) -> None:
        """A core may die while it is being closed, before anybody reads of it: it was not us who ended it."""
        if self._core is None or self._core.ended_by_itself is None or self.slot.has_lost_core:
            return
        error = EngineDeadError(f"The engine core ended unexpectedly ({self._core.ended_by_itself}).")
        log.error("%s: %s", self.metrics.model_name, error)
        self.slot.bury(error)


def _log_ready(name: str, client: EngineCoreClient) -> None:
    ready = client.ready
    cache = ""  # of a model that pools
    if ready.num_blocks:
        size = f"{ready.kv_cache_bytes / 2**30:.1f} GiB"
        cache = f"{ready.num_blocks} KV blocks of {ready.block_size} tokens ({size}), "
    log.info("%s: engine ready: %s; %sloaded in %.1f s", name, ready.kernels, cache, ready.load_seconds)
