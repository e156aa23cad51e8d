"""The engine core's side of the link: frames in, steps, frames out.

    core nursery
    ├─ writer       queued messages -> socket
    ├─ step thread  computes
    ├─ grammars     compiles, in a thread
    └─ connection
       ├─ reader     Add / Abort -> EngineCore, at once
       ├─ step loop  schedule -> execute (in the thread) -> finish
       │             meanwhile: StepOutputs of the step before, plan of the next
       ├─ an Add that waits for its grammar, each
       └─ a Utility call, each

The connection is the scope of every request that came over it: when it ends, so does all of this.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.core.engine import EngineCore
from trioserve.core.request import CoreRequest, MultimodalKey
from trioserve.core.step_result import StepResult
from trioserve.errors import EngineGenerateError, InvalidRequestError, TrioserveError
from trioserve.link.client import config_hash
from trioserve.link.columns import pack_step, unpack_token_ids
from trioserve.link.controls import Controls
from trioserve.link.grammar_compiler import GrammarCompiler
from trioserve.link.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    CutOffError,
    Fatal,
    Hello,
    MessageError,
    Ready,
    Refused,
    Utility,
    UtilityResult,
)
from trioserve.link.populating import CachePopulation
from trioserve.link.step_parts import split_step
from trioserve.link.step_thread import StepThread
from trioserve.link.watchdog import SLICES
from trioserve.nurseries import ungrouped
from trioserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.link.message_stream import MessageStream
    from trioserve.link.messages import Message
    from trioserve.link.step_thread import Job
    from trioserve.structured_outputs import StructuredOutputsParams
    from trioserve.worker.batch import SequenceOutput
    from trioserve.worker.grammar import GrammarMatcher
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
    started = time.perf_counter()
    with ExitStack() as closing:
        async with StepThread.open() as thread:
            loading = thread.start(_load, hello, closing)  # while the grammars' tokenizer is made
            async with GrammarCompiler.open(hello.model, hello.config.structured_outputs) as grammars:
                num_blocks, runner = await loading.wait()
                core = EngineCore.from_config(runner, hello.config, hello.model, num_blocks=num_blocks)
                controls = Controls(core, thread, runner, num_blocks)
                failed = await controls.adapters.load_all(hello.config.lora)
                seconds = time.perf_counter() - started
                ready = _ready(hello, runner, num_blocks, seconds)
                stream.send_nowait(attrs.evolve(ready, failed_adapters=failed))
                await stream.flush()
                on_ready()
                connection = _Connection(
                    stream,
                    thread,
                    runner,
                    grammars,
                    controls,
                    step_timeout=hello.config.supervision.step_timeout,
                )
                await connection.serve()


def _check_version(hello: Hello) -> None:
    if hello.protocol != PROTOCOL_VERSION or hello.version != __version__:
        raise MessageError(
            f"the client is version {hello.version} (protocol {hello.protocol}), "
            f"the engine core is {__version__} (protocol {PROTOCOL_VERSION})"
        )


def _ready(hello: Hello, runner: ModelRunner, num_blocks: int, load_seconds: float) -> Ready:
    return Ready(
        protocol=PROTOCOL_VERSION,
        version=__version__,
        config_hash=config_hash(hello.config, hello.model),
        num_blocks=num_blocks,
        block_size=hello.config.cache.block_size,
        kv_cache_bytes=num_blocks * runner.bytes_per_block,
        load_seconds=load_seconds,
        kernels=runner.kernels,
    )


def _load(hello: Hello, closing: ExitStack) -> tuple[int, ModelRunner]:
    """Blocking: read the weights and allocate the cache. Runs in the thread that will compute.

    closing: closed once that thread has ended. It gets the runner even if the cache does not fit, or nobody
    waits for it any more.
    """
    # What computes, and not before a Hello asks for it.
    from trioserve.worker.memory import num_kv_blocks  # noqa: PLC0415
    from trioserve.worker.model_runner import ModelRunner  # noqa: PLC0415

    runner = ModelRunner(hello.model, hello.config)
    closing.callback(runner.close)
    num_blocks = num_kv_blocks(runner.layout, runner.bytes_per_block, hello.config, hello.model)
    runner.allocate_kv_cache(num_blocks)
    return num_blocks, runner


class _Connection:
    """Everything that came over one link, until that ends."""

    def __init__(
        self,
        stream: MessageStream,
        thread: StepThread,
        runner: ModelRunner,
        grammars: GrammarCompiler,
        controls: Controls,
        *,
        step_timeout: float,
    ) -> None:
        self._stream = stream
        self._step_timeout = step_timeout
        self._thread = thread
        self._core = controls.core
        self._runner = runner
        self._grammars = grammars
        self._controls = controls
        self._wake_steps = trio.Event()
        self._population = CachePopulation(thread, runner, controls.num_blocks)
        # Sequences that wait for their grammar; each has a task, which its scope ends.
        self._waiting_for_grammar = controls.on_their_way
        self._num_tokens_waiting: dict[int, int] = {}  # in their prompts
        self._num_received = 0  # sequences, so far
        self._arrivals_told = self._arrivals  # what the client knows

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_steps)
            await self._read_messages(nursery)
            nursery.cancel_scope.cancel()

    async def _read_messages(self, nursery: trio.Nursery) -> None:
        """Apply each message as it comes, also while a step runs; ends with the stream."""
        while (message := await self._receive()) is not None:
            match message:
                case Add():
                    self._receive_add(message, nursery)
                case Abort():
                    self._abort(message.request_ids)
                case Utility():
                    nursery.start_soon(self._answer, message)
                    await _let_others_run()  # calls begin in the order in which they were made
                case _:
                    raise MessageError(f"unexpected {type(message).__name__}")
            self._wake_steps.set()

    async def _receive(self) -> Message | None:
        """The next message; None if the client has ended, which it may do in the middle of one: what it had
        not sent then is lost."""
        try:
            return await self._stream.receive()
        except CutOffError:
            return None

    # Requests

    def _receive_add(self, add: Add, nursery: trio.Nursery) -> None:
        self._num_received += 1
        grammar = None
        try:
            self._controls.adapters.check(add.lora)
            self._runner.check_params(add.params)
            if add.params.structured_outputs is not None:
                grammar = self._grammars.try_get(add.params.structured_outputs)
                if grammar is None:
                    scope = self._waiting_for_grammar[add.request_id] = trio.CancelScope()
                    self._num_tokens_waiting[add.request_id] = add.num_prompt_tokens
                    nursery.start_soon(self._add_with_grammar, add, add.params.structured_outputs, scope)
                    return
        except InvalidRequestError as error:
            self._refuse(add, error)
            return
        self._add(add, grammar)

    async def _add_with_grammar(
        self, add: Add, params: StructuredOutputsParams, scope: trio.CancelScope
    ) -> None:
        deadline = trio.current_time() + (math.inf if add.time_left is None else add.time_left)
        try:
            with scope:
                grammar = await self._grammars.compile(params)
                if not scope.cancel_called:  # by an abort that came together with the grammar
                    left = deadline - trio.current_time()
                    self._add(attrs.evolve(add, time_left=None if math.isinf(left) else left), grammar)
        except InvalidRequestError as error:
            self._refuse(add, error)
        except EngineGenerateError as error:
            log.error("request %d: %s", add.request_id, error)
            self._send(StepResult.failure(add.request_id))
        finally:
            self._stop_waiting(add.request_id)
        self._controls.between_steps.notify()
        self._wake_steps.set()

    def _stop_waiting(self, request_id: int) -> None:
        self._waiting_for_grammar.pop(request_id, None)
        self._num_tokens_waiting.pop(request_id, None)

    def _add(self, add: Add, grammar: GrammarMatcher | None) -> None:
        try:
            self._core.add(_to_core_request(add, grammar))
        except ValueError as error:  # the frontend let it through
            log.error("request %d cannot be run: %s", add.request_id, error)
            self._refuse(add, InvalidRequestError(f"The request cannot be run: {error}."))

    def _refuse(self, add: Add, error: InvalidRequestError) -> None:
        self._stream.send_nowait(
            Refused(request_id=add.request_id, message=str(error), parameter=error.parameter)
        )

    def _abort(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            if (scope := self._waiting_for_grammar.get(request_id)) is not None:
                scope.cancel()
                self._stop_waiting(request_id)  # now, so that it is not counted until its task has ended
        self._core.abort(request_ids)
        self._controls.between_steps.notify()
        if self._core.has_freed or self._stats_changed:
            self._send(self._core.take_freed())

    async def _answer(self, call: Utility) -> None:
        result = error = None
        try:
            result = await self._controls.call(call.method, call.args)
        except (TypeError, ValueError, TrioserveError) as caught:  # this caller's fault or misfortune
            error = str(caught)
        self._wake_steps.set()
        self._send(StepResult())
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
                await self._population.go_on_until(self._wake_steps)
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

    async def _wait_for(self, job: Job[Sequence[SequenceOutput]]) -> Sequence[SequenceOutput]:
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
            for part in split_step(result):
                self._send(part)

    @property
    def _stats_changed(self) -> bool:
        """Arrivals, aborts and ends change the counts also without a step."""
        return self._core.stats_changed or self._arrivals_told != self._arrivals

    @property
    def _arrivals(self) -> tuple[int, int]:
        return self._num_received, len(self._waiting_for_grammar)

    def _send(self, result: StepResult) -> None:
        stats = self._core.take_stats()
        self._arrivals_told = self._arrivals
        stats = attrs.evolve(
            stats,
            num_waiting=stats.num_waiting + len(self._waiting_for_grammar),
            num_queued_tokens=stats.num_queued_tokens + sum(self._num_tokens_waiting.values()),
            num_received=self._num_received,
            sleep_level=self._controls.sleep_level,
        )
        self._stream.send_nowait(pack_step(result, stats))


async def _let_others_run() -> None:
    """At the first checkpoint the loop looks at the socket; by the second, whoever could run has run."""
    await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()


def _to_core_request(add: Add, grammar: GrammarMatcher | None) -> CoreRequest:
    return CoreRequest(
        request_id=add.request_id,
        prompt_token_ids=unpack_token_ids(add.prompt_token_ids).tolist(),
        params=add.params,
        constraints=add.constraints,
        seed=add.seed,
        streams=add.streams,
        priority=add.priority,
        deadline=math.inf if add.time_left is None else time.monotonic() + add.time_left,
        grammar=grammar,
        cache_salt=add.cache_salt,
        lora=add.lora,
        audio=add.audio,
        multimodal_keys=() if add.audio is None else [_heard_by_all(add)],
    )


def _heard_by_all(add: Add) -> MultimodalKey:
    """The whole prompt means what its audio says."""
    assert add.audio is not None
    return MultimodalKey(position=0, length=add.num_prompt_tokens, digest=add.audio.digest)
