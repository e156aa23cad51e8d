"""The engine core's side of the link: frames in, steps, frames out.

    core nursery
    ├─ writer       queued messages -> socket
    ├─ step thread  computes
    ├─ grammars     compiles, in a thread
    └─ connection
       ├─ reader     Add / Abort -> EngineCore, at once
       ├─ step loop  schedule -> execute (in the thread) -> finish
       │             meanwhile: StepOutputs of the step before, plan of the next
       ├─ what a request waits for first, such as its grammar, each
       └─ a Utility call, each

The connection is the scope of every request that came over it: when it ends, so does all of this.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic

import attrs
import trio

from trioserve.core.engine import EngineCore
from trioserve.core.pooling import PoolingCore
from trioserve.errors import InvalidRequestError, TrioserveError
from trioserve.link.client import config_hash
from trioserve.link.controls import Controls
from trioserve.link.generation_service import GenerationService
from trioserve.link.grammar_compiler import GrammarCompiler
from trioserve.link.message_stream import MessageStream
from trioserve.link.messages import (
    PROTOCOL_VERSION,
    Abort,
    CutOffError,
    Fatal,
    Hello,
    MessageError,
    Ready,
    Refused,
    Utility,
    UtilityResult,
)
from trioserve.link.pooling_service import PoolingService, SteeredPoolingRunner
from trioserve.link.populating import CachePopulation
from trioserve.link.service import OutputsT, PlanT, ResultT
from trioserve.link.step_thread import StepThread
from trioserve.link.watchdog import SLICES
from trioserve.nurseries import ungrouped
from trioserve.version import __version__

if TYPE_CHECKING:
    from trioserve.core.pooling import PoolingRunner
    from trioserve.link.messages import Message
    from trioserve.link.service import Service
    from trioserve.link.step_thread import Job
    from trioserve.worker.model_runner import ModelRunner

__all__ = ["serve_core"]

log = logging.getLogger(__name__)

_GOODBYE_TIMEOUT = 1.0
"""Seconds to deliver a Fatal to a client that may not be reading."""


async def serve_core(stream: MessageStream, on_ready: Callable[[], None] = lambda: None) -> bool:
    """Be an engine core for the client at the other end, until it closes its end. `on_ready` is called once
    the client has been told that the model is there.

    Returns True after an orderly end, and False after a failure, which the client has been told.
    """
    failed = False
    with trio.CancelScope() as everything:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run_writer)
            try:
                with ungrouped():
                    await _serve(stream, on_ready)
            except Exception as error:
                failed = True  # a return here would be lost to the cancellation that follows
                await _say_goodbye(stream, error)
            finally:
                everything.cancel()
    return not failed


async def _say_goodbye(stream: MessageStream, error: Exception) -> None:
    """The client reports it, with the traceback where it is no plain matter of configuration."""
    known = isinstance(error, TrioserveError)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    details = "" if known else "".join(traceback.format_exception(error))
    stream.send_nowait(Fatal(message=text, traceback=details))
    with trio.move_on_after(_GOODBYE_TIMEOUT):
        await stream.flush()
    if stream.broken:
        log.error("The engine core failed, and its client is gone: %s\n%s", text, details)


async def _serve(stream: MessageStream, on_ready: Callable[[], None]) -> None:
    hello = await stream.receive()
    if hello is None:
        return
    if not isinstance(hello, Hello):
        raise MessageError(f"expected Hello, got {type(hello).__name__}")
    _check_version(hello)
    with ExitStack() as closing:
        async with StepThread.open() as thread:
            start = _Start(hello, stream, thread, closing, on_ready)
            if hello.model.runner == "pooling":
                await start.pooling()
            else:
                await start.generation()


def _check_version(hello: Hello) -> None:
    if hello.protocol != PROTOCOL_VERSION or hello.version != __version__:
        raise MessageError(
            f"the client is version {hello.version} (protocol {hello.protocol}), "
            f"the engine core is {__version__} (protocol {PROTOCOL_VERSION})"
        )


@attrs.frozen(eq=False)
class _Start:
    """What a core is made of, by the model's runner, and then its connection."""

    _hello: Hello
    _stream: MessageStream
    _thread: StepThread
    _closing: ExitStack
    """Closed once the thread has ended. It gets the runner even if loading fails later, or nobody waits for
    it any more."""
    _on_ready: Callable[[], None]
    _started: float = attrs.field(factory=time.perf_counter, init=False)

    async def generation(self) -> None:
        config, model, thread = self._hello.config, self._hello.model, self._thread
        loading = thread.start(_load, self._hello, self._closing)  # while the grammars' tokenizer is made
        async with GrammarCompiler.open(model, config.structured_outputs) as grammars:
            num_blocks, runner = await loading.wait()
            limit = runner.max_num_seqs(num_blocks)
            core = EngineCore.from_config(runner, config, model, num_blocks=num_blocks, max_num_seqs=limit)
            controls = Controls(core, thread, runner, num_blocks)
            population = CachePopulation(thread, runner, num_blocks)
            service = GenerationService(core, runner, grammars, controls, population)
            await self._serve(service, controls, runner.kernels, num_blocks * runner.bytes_per_block)

    async def pooling(self) -> None:
        config, model, thread = self._hello.config, self._hello.model, self._thread
        runner = await thread.run(_load_pooling, self._hello, self._closing)
        core = PoolingCore(runner, config.scheduler, max_model_len=model.max_model_len)
        controls = Controls(core, thread, SteeredPoolingRunner(runner), 0)
        await self._serve(PoolingService(core), controls, runner.kernels, 0)

    async def _serve(
        self,
        service: Service[PlanT, OutputsT, ResultT],
        controls: Controls,
        kernels: str,
        kv_cache_bytes: int,
    ) -> None:
        config = self._hello.config
        ready = Ready(
            protocol=PROTOCOL_VERSION,
            version=__version__,
            config_hash=config_hash(config, self._hello.model),
            num_blocks=controls.num_blocks,
            block_size=config.cache.block_size,
            kv_cache_bytes=kv_cache_bytes,
            failed_adapters=await controls.adapters.load_all(config.lora),
            load_seconds=time.perf_counter() - self._started,
            kernels=kernels,
        )
        self._stream.send_nowait(ready)
        await self._stream.flush()
        self._on_ready()
        step_timeout = config.supervision.step_timeout
        await _Connection(self._stream, self._thread, service, controls, step_timeout=step_timeout).serve()


def _load(hello: Hello, closing: ExitStack) -> tuple[int, ModelRunner]:
    """Blocking: read the weights and allocate the cache. Runs in the thread that will compute."""
    # What computes, and not before a Hello asks for it.
    from trioserve.worker.memory import num_kv_blocks  # noqa: PLC0415
    from trioserve.worker.model_runner import ModelRunner  # noqa: PLC0415

    runner = ModelRunner(hello.model, hello.config)
    closing.callback(runner.close)
    num_blocks = num_kv_blocks(runner.layout, runner.bytes_per_block, hello.config, hello.model)
    runner.allocate_kv_cache(num_blocks)
    return num_blocks, runner


def _load_pooling(hello: Hello, closing: ExitStack) -> PoolingRunner:
    """As `_load`, where there is no cache."""
    from trioserve.worker.pooling_runner import PoolingRunner  # noqa: PLC0415 - as above

    runner = PoolingRunner(hello.model, hello.config)
    closing.callback(runner.close)
    return runner


class _Connection(Generic[PlanT, OutputsT, ResultT]):
    """Everything that came over one link, until that ends. To the service it is a
    `trioserve.link.service.Caller`."""

    nursery: trio.Nursery

    def __init__(
        self,
        stream: MessageStream,
        thread: StepThread,
        service: Service[PlanT, OutputsT, ResultT],
        controls: Controls,
        *,
        step_timeout: float,
    ) -> None:
        self._stream = stream
        self._step_timeout = step_timeout
        self._thread = thread
        self._service = service
        self._core = service.core
        self._controls = controls
        self._wake_steps = trio.Event()
        self._num_received = 0  # requests, so far
        self._arrivals_told = self._arrivals  # what the client knows

    async def serve(self) -> None:
        async with trio.open_nursery() as self.nursery:
            self.nursery.start_soon(self._run_steps)
            await self._read_messages()
            self.nursery.cancel_scope.cancel()

    async def _read_messages(self) -> None:
        """Apply each message as it comes, also while a step runs; ends with the stream."""
        while (message := await self._receive()) is not None:
            match message:
                case Abort():
                    self._abort(message.request_ids)
                case Utility():
                    self.nursery.start_soon(self._answer, message)
                    await _let_others_run()  # calls begin in the order in which they were made
                case _:
                    self._num_received += 1
                    self._service.receive(message, self)
            self._wake_steps.set()

    async def _receive(self) -> Message | None:
        """The next message; None if the client has ended, which it may do in the middle of one: what it had
        not sent then is lost."""
        try:
            return await self._stream.receive()
        except CutOffError:
            return None

    # Requests

    def refuse(self, request_id: int, error: InvalidRequestError) -> None:
        self._stream.send_nowait(
            Refused(request_id=request_id, message=str(error), parameter=error.parameter)
        )

    def _abort(self, request_ids: list[int]) -> None:
        self._service.abort(request_ids)
        self._controls.between_steps.notify()
        if self._core.has_freed or self._stats_changed:
            self.report(self._core.take_freed())

    def wake(self) -> None:
        self._controls.between_steps.notify()
        self._wake_steps.set()

    async def _answer(self, call: Utility) -> None:
        result = error = None
        try:
            result = await self._controls.call(call.method, call.args)
        except (TypeError, ValueError, TrioserveError) as caught:  # this caller's fault or misfortune
            error = str(caught)
        self._wake_steps.set()
        self.report(self._core.take_freed())
        self._stream.send_nowait(UtilityResult(call_id=call.call_id, result=result, error=error))

    # Steps

    async def _run_steps(self) -> None:
        """Step while there is work, and sleep while there is none; runs until cancelled."""
        while True:
            self._wake_steps = trio.Event()
            plan = self._core.schedule()
            if plan is None:
                self._send_result()
                self._controls.between_steps.notify()  # requests that came too late have ended
                await self._service.rest_until(self._wake_steps)
                continue
            job = self._thread.start(self._core.execute, plan)
            # While it runs: report the step before, and decide what can be decided of the next.
            self._send_result()
            self._core.plan_ahead()
            await self._stream.wait_room()
            outputs = await self._wait_for(job)
            # Messages that came during the step count before the next one: an abort that lost this race would
            # cost its request one more step.
            await _let_others_run()
            self._core.finish(plan, outputs)
            self._controls.between_steps.arrive()

    async def _wait_for(self, job: Job[OutputsT]) -> OutputsT:
        """The step's result. A step that takes too long cannot be ended, as a thread cannot, and everything
        in here that ends waits for it. So the client is told while the writer still runs, and ends the
        process; in its own process it can only wait for the step, too.

        The time is counted in slices, as the client's watchdog does: where all of this was stopped for a
        while (a debugger, a frozen container), that costs one of them."""
        for _ in range(SLICES):
            with trio.move_on_after(self._step_timeout / SLICES):
                return await job.wait()
        text = f"a step took longer than {self._step_timeout:g} seconds (--step-timeout)"
        self._stream.send_nowait(Fatal(message=text, traceback=""))
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    def _send_result(self) -> None:
        result = self._core.take_result()
        for failure in result.failures:
            log.error("%s", failure)
        if result.request_ids or result.freed or self._stats_changed:
            for part in self._service.split(result):
                self.report(part)

    @property
    def _stats_changed(self) -> bool:
        """Arrivals, aborts and ends change the counts also without a step."""
        return self._core.stats_changed or self._arrivals_told != self._arrivals

    @property
    def _arrivals(self) -> tuple[int, int]:
        return self._num_received, self._service.num_on_their_way

    def report(self, result: ResultT) -> None:
        stats = self._core.take_stats()
        self._arrivals_told = self._arrivals
        stats = attrs.evolve(
            stats,
            num_waiting=stats.num_waiting + self._service.num_on_their_way,
            num_queued_tokens=stats.num_queued_tokens + self._service.num_tokens_on_their_way,
            num_received=self._num_received,
            sleep_level=self._controls.sleep_level,
        )
        self._stream.send_nowait(self._service.pack(result, stats))


async def _let_others_run() -> None:
    """At the first checkpoint the loop looks at the socket; by the second, whoever could run has run."""
    await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()
