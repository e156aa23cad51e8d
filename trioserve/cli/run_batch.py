"""`trioserve run-batch`: the engine, the application and the batch in one nursery tree.

run-batch
├─ signals      SIGINT or SIGTERM ends everything; what is finished is in the output
├─ output       locked, and recovered from what an earlier run has left
├─ AsyncLLM
└─ batch        batch/run.py: one task reads lines, so many others ask for them
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.args import EngineArgs
from trioserve.async_llm import AsyncLLM
from trioserve.batch.application import open_application
from trioserve.batch.line_reader import LineReader, count_lines
from trioserve.batch.output import open_input, open_output
from trioserve.batch.run import Batch, Tally
from trioserve.cli.exit_codes import ExitCode
from trioserve.cli.logs import configure_logging
from trioserve.cli.messages import one_line
from trioserve.errors import EngineDeadError
from trioserve.nurseries import end_nursery, ungrouped
from trioserve.progress_bar import ProgressBar
from trioserve.server.app import create_app
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from trioserve.batch.output import Output

__all__ = ["BatchJob"]


@attrs.define(eq=False, kw_only=True)
class BatchJob:
    """What one run is to do."""

    engine_args: EngineArgs
    server_args: ServerArgs
    input_name: str
    output_name: str
    concurrency: int
    retry_errors: bool
    shows_progress: bool
    _exit_code: ExitCode = attrs.field(init=False, default=ExitCode.DONE)

    def run(self) -> int:
        """Blocks; returns the exit code (see `ExitCode`).

        Raises:
          TrioserveError: it could not start, or a file cannot be read or written; the text says why.
          BrokenPipeError: nobody reads the output.
        """
        configure_logging(self.engine_args.log)
        with ungrouped():
            return trio.run(self._run)

    async def _run(self) -> int:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._handle_signals, nursery.cancel_scope)
            with open_input(self.input_name) as source:
                async with open_output(self.output_name, retry_errors=self.retry_errors) as output:
                    await self._answer(source, output)
            end_nursery(nursery)
        return self._exit_code

    async def _answer(self, source: int, output: Output) -> None:
        total = await count_lines(source)
        llm = AsyncLLM.from_engine_args(self.engine_args)
        try:
            async with llm, open_application(create_app(llm, self.server_args)) as application:
                with ProgressBar(total, self.shows_progress, what="Answered lines", unit="line") as progress:
                    batch = Batch(
                        # A line is a body and little else.
                        lines=LineReader(source, self.server_args.max_body_size),
                        application=application,
                        output=output,
                        concurrency=self.concurrency,
                        progress=progress,
                        has_died=lambda: llm.errored,
                    )
                    await batch.run()
            self._report(batch.tally)
        except EngineDeadError as error:
            print(f"trioserve run-batch: {one_line(error)}", file=sys.stderr)
            self._exit_code = ExitCode.ENGINE_DEAD

    def _report(self, tally: Tally) -> None:
        if tally.errors:
            self._exit_code = ExitCode.LINES_FAILED
        earlier = f", {tally.earlier} of them in earlier runs" if tally.earlier else ""
        print(f"trioserve run-batch: {tally.good} answered, {tally.errors} errors{earlier}", file=sys.stderr)

    async def _handle_signals(
        self, everything: trio.CancelScope, *, task_status: trio.TaskStatus[None]
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                self._exit_code = ExitCode.INTERRUPTED
                everything.cancel()
                return
