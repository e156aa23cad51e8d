"""The engine core's side of the link: frames in, steps, frames out.

    core nursery
    ├─ writer       queued messages -> socket
    ├─ step thread  computes
    ├─ reader       Add / Abort / Utility -> EngineCore, at once
    └─ step loop    schedule -> execute (in the thread) -> finish -> StepOutputs

The connection is the scope of every request that came over it: when it ends, so does all of this.
"""

from __future__ import annotations

import logging
import time
import traceback
from typing import TYPE_CHECKING, Any

import trio

from trioserve.core.engine import CoreRequest, EngineCore, StepResult
from trioserve.errors import TrioserveError
from trioserve.link.client import config_hash
from trioserve.link.columns import pack_step, unpack_token_ids
from trioserve.link.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Fatal,
    Hello,
    MessageError,
    Ready,
    Utility,
    UtilityResult,
)
from trioserve.link.step_thread import StepThread
from trioserve.nurseries import ungrouped
from trioserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioserve.link.message_stream import MessageStream
    from trioserve.worker.model_runner import ModelRunner

__all__ = ["serve_core"]

log = logging.getLogger(__name__)

_GOODBYE_TIMEOUT = 1.0
"""Seconds to deliver a Fatal to a client that may not be reading."""


async def serve_core(stream: MessageStream) -> bool:
    """Be an engine core for the client at the other end, until it closes its end.

    Returns True after an orderly end, and False after a failure, which the client has been told.
    """
    with trio.CancelScope() as everything:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run_writer)
            try:
                with ungrouped():
                    await _serve(stream)
            except Exception as error:
                await _say_goodbye(stream, error)
                return False
            finally:
                everything.cancel()
    return True


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


async def _serve(stream: MessageStream) -> None:
    hello = await stream.receive()
    if hello is None:
        return
    if not isinstance(hello, Hello):
        raise MessageError(f"expected Hello, got {type(hello).__name__}")
    async with StepThread.open() as thread:
        server = await _start(stream, thread, hello)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run_steps)
            await server.read_messages()
            nursery.cancel_scope.cancel()


async def _start(stream: MessageStream, thread: StepThread, hello: Hello) -> _CoreServer:
    if hello.protocol != PROTOCOL_VERSION or hello.version != __version__:
        raise MessageError(
            f"the client is version {hello.version} (protocol {hello.protocol}), "
            f"the engine core is {__version__} (protocol {PROTOCOL_VERSION})"
        )
    started = time.perf_counter()
    num_blocks, runner = await thread.run(_load, hello)
    core = EngineCore.from_config(runner, hello.config, hello.model, num_blocks=num_blocks)
    ready = Ready(
        protocol=PROTOCOL_VERSION,
        version=__version__,
        config_hash=config_hash(hello.config, hello.model),
        num_blocks=num_blocks,
        block_size=hello.config.cache.block_size,
        kv_cache_bytes=num_blocks * runner.bytes_per_block,
        load_seconds=time.perf_counter() - started,
    )
    stream.send_nowait(ready)
    return _CoreServer(stream, thread, core)


def _load(hello: Hello) -> tuple[int, ModelRunner]:
    """Blocking: read the weights and allocate the cache. Runs in the thread that will compute."""
    # torch, and not before a Hello asks for it.
    from trioserve.worker.memory import num_kv_blocks  # noqa: PLC0415
    from trioserve.worker.model_runner import ModelRunner  # noqa: PLC0415

    runner = ModelRunner(hello.model, hello.config)
    num_blocks = num_kv_blocks(runner.bytes_per_block, hello.config, hello.model)
    runner.allocate_kv_cache(num_blocks)
    return num_blocks, runner


class _CoreServer:
    def __init__(self, stream: MessageStream, thread: StepThread, core: EngineCore) -> None:
        self._stream = stream
        self._thread = thread
        self._core = core
        self._wake_steps = trio.Event()
        self._utilities: dict[str, Callable[..., Any]] = {
            "ping": lambda: True,
            "reset_prefix_cache": core.reset_prefix_cache,
        }

    async def read_messages(self) -> None:
        """Apply each message as it comes, also while a step runs; ends with the stream."""
        while (message := await self._stream.receive()) is not None:
            match message:
                case Add():
                    self._add(message)
                case Abort():
                    self._core.abort(message.request_ids)
                    self._send_stats_if_changed()
                case Utility():
                    self._stream.send_nowait(self._call(message))
                case _:
                    raise MessageError(f"unexpected {type(message).__name__}")
            self._wake_steps.set()

    def _add(self, add: Add) -> None:
        try:
            self._core.add(_to_core_request(add))
        except ValueError as error:  # the frontend let it through: this request's failure, nobody else's
            log.error("request %d cannot be run: %s", add.request_id, error)
            self._send(StepResult.failure(add.request_id))

    def _call(self, call: Utility) -> UtilityResult:
        method = self._utilities.get(call.method)
        if method is None:
            return UtilityResult(call_id=call.call_id, error=f"there is no method {call.method!r}")
        try:
            return UtilityResult(call_id=call.call_id, result=method(*call.args))
        except TypeError as error:  # wrong arguments are the caller's fault
            return UtilityResult(call_id=call.call_id, error=str(error))

    async def run_steps(self) -> None:
        """Step while there is work, and sleep while there is none; runs until cancelled."""
        while True:
            self._wake_steps = trio.Event()
            plan = self._core.schedule()
            if plan is None:
                self._send_stats_if_changed()
                await self._wake_steps.wait()
                continue
            sampled = await self._thread.run(self._core.execute, plan)
            await self._let_reader_catch_up()
            self._send(self._core.finish(plan, sampled))
            await self._stream.wait_room()

    @staticmethod
    async def _let_reader_catch_up() -> None:
        """Messages that came during the step count before the next one: an abort that lost this race would
        cost its request one more step. At the first checkpoint the loop looks at the socket, and by the
        second the reader has run."""
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()

    def _send_stats_if_changed(self) -> None:
        """Aborts and ends change the counts without a step: the gauges must fall all the same."""
        if self._core.stats_changed:
            self._send(StepResult())

    def _send(self, result: StepResult) -> None:
        self._stream.send_nowait(pack_step(result, self._core.take_stats()))


def _to_core_request(add: Add) -> CoreRequest:
    return CoreRequest(
        request_id=add.request_id,
        prompt_token_ids=unpack_token_ids(add.prompt_token_ids).tolist(),
        params=add.params,
        seed=add.seed,
        streams=add.streams,
        priority=add.priority,
        cache_salt=add.cache_salt,
    )
