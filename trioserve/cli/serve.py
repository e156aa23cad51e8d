"""`trioserve serve`: the engines and the HTTP server in one nursery tree.

serve
├─ signals     the first SIGTERM or SIGINT drains, the second ends everything
├─ import      of what answers HTTP, in a thread, while the engines start
├─ AsyncLLM    one per model, side by side (cli/engines.py); owned here, not by the web framework
├─ undertaker  one per engine, whose death for good ends the server
└─ answering
   ├─ responses   the file of kept responses, if there is one
   ├─ background  responses for which no client waits, a task each
   ├─ closing     once it drains: requests that run too long are ended, and told why
   └─ http        accept, drain, cancel

If an engine core dies, its AsyncLLM restarts it or not (`--engine-restart`); the server, its sockets and its
connections stay, and so do the other models. Only once one is dead for good does the server end, with exit
code 3.
"""

from __future__ import annotations

import importlib
import logging
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.args import EngineArgs
from trioserve.cli.engines import make_engines, open_engines
from trioserve.cli.exit_codes import ExitCode
from trioserve.cli.logs import configure_logging
from trioserve.nurseries import end_nursery, ungrouped
from trioserve.server.connection_room import raise_file_limit
from trioserve.server.listeners import bound_listener, describe
from trioserve.server.tls import Certificates
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    import socket

    from trioserve.async_llm import AsyncLLM

__all__ = ["serve"]

log = logging.getLogger("trioserve.serve")

_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}

_DEATH_NOTICE = 1.0
"""Seconds in which a server without engine still answers, with errors and a failing /health."""


def serve(models: Sequence[EngineArgs], server_args: ServerArgs) -> int:
    """Serve until a signal or an engine's death. Blocks; returns the exit code (see `ExitCode`). What the log
    shows is as the first model has it.

    Raises:
      TrioserveError: it could not start; the text says why.
    """
    configure_logging(models[0].log)
    raise_file_limit()
    with ungrouped():
        return trio.run(_Server(models, server_args).run)


@attrs.define(eq=False)
class _Server:
    models: Sequence[EngineArgs]
    server_args: ServerArgs
    _certificates: Certificates | None = attrs.field(init=False)
    # Set by the first signal, or by an engine's death for good: from then on, what runs may finish.
    _drain: trio.Event = attrs.field(init=False, factory=trio.Event)
    _serving: bool = attrs.field(init=False, default=False)
    _exit_code: ExitCode = attrs.field(init=False, default=ExitCode.DONE)

    @_certificates.default
    def _load_certificates(self) -> Certificates | None:
        return Certificates.from_args(self.server_args)

    async def run(self) -> int:
        with bound_listener(self.server_args) as listener:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._handle_signals, nursery.cancel_scope)
                nursery.start_soon(trio.to_thread.run_sync, _import_answering)
                await self._serve(listener)
                end_nursery(nursery)
        return self._exit_code

    async def _serve(self, listener: socket.socket) -> None:
        llms = make_engines(self.models)
        try:
            await self._serve_with(llms, listener)
        finally:
            # Asked at the very end, and however that came: a death counts also if nobody saw it in time.
            if any(llm.errored for llm in llms):
                self._exit_code = ExitCode.ENGINE_DEAD
        log.info("stopped")

    async def _serve_with(self, llms: Sequence[AsyncLLM], listener: socket.socket) -> None:
        started = time.monotonic()
        async with open_engines(llms), trio.open_nursery() as nursery:
            from trioserve.cli.answering import answer_requests  # noqa: PLC0415 - is there by now

            for llm in llms:
                nursery.start_soon(self._watch_engine, llm)
            await answer_requests(
                llms,
                listener,
                self.server_args,
                certificates=self._certificates,
                drain=self._drain,
                on_ready=partial(self._report_ready, llms, listener, started),
            )
            end_nursery(nursery)

    def _report_ready(self, llms: Sequence[AsyncLLM], listener: socket.socket, started: float) -> None:
        self._serving = True
        args, seconds = self.server_args, time.monotonic() - started
        names = ",".join(llm.config.model.served_model_names[0] for llm in llms)
        precisions = "; ".join(llm.model.precision for llm in llms)
        log.info(
            "serving %s on %s (%s; ready in %.1f s)", names, describe(listener, args), precisions, seconds
        )
        is_local = args.uds is not None or args.fd is not None or args.host in _LOCAL_HOSTS
        if not args.api_key and not is_local:
            log.warning("no --api-key: whoever can reach %s may use all of it", args.host)

    async def _watch_engine(self, llm: AsyncLLM) -> None:
        await llm.wait_dead()
        await trio.sleep(_DEATH_NOTICE)
        name = llm.config.model.served_model_names[0]
        log.error("the engine core of %s is dead; stopping with exit code %d", name, ExitCode.ENGINE_DEAD)
        self._drain.set()

    async def _handle_signals(
        self, everything: trio.CancelScope, *, task_status: trio.TaskStatus[None]
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                if self._serving and not self._drain.is_set():
                    log.info("%s: finishing what runs", signal.Signals(number).name)
                    self._drain.set()
                else:  # nothing to finish yet, or somebody does not want to wait
                    self._exit_code = ExitCode.INTERRUPTED
                    everything.cancel()


def _import_answering() -> None:
    importlib.import_module("trioserve.cli.answering")
