"""Running a batch: the lines of the input to the application, its answers to the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import msgspec
import trio

from trioserve.batch.application import Application
from trioserve.batch.earlier_results import digest_of
from trioserve.batch.errors import BatchFileError
from trioserve.batch.line_reader import Line, LineReader
from trioserve.batch.lines import BatchRequest, Reply, Result, WrongLineError, parse_request
from trioserve.batch.output import Output
from trioserve.errors import EngineDeadError

__all__ = ["Batch", "Progress", "Tally"]

_MAX_ATTEMPTS = 10
"""How often a line is asked for that the application has no room for."""


class Progress(Protocol):
    def count(self, number: int, num_input_tokens: int, num_output_tokens: int) -> None:
        """So many lines are done, with so many tokens."""


@attrs.define
class Tally:
    """Lines of the output."""

    good: int = 0
    errors: int = 0
    earlier: int = 0
    """Those of both kinds that earlier runs have left."""


@attrs.define(eq=False, kw_only=True)
class Batch:
    """One run. Its queue holds nothing: a line is read when somebody is free to ask for it."""

    lines: LineReader
    application: Application
    output: Output
    concurrency: int
    """Lines under way at a time."""
    progress: Progress
    has_died: Callable[[], bool]
    """The engine has, for good."""
    tally: Tally = attrs.field(init=False, factory=Tally)
    # Digests of the custom_ids of the input, as far as it was read.
    _seen: set[bytes] = attrs.field(init=False, factory=set)

    async def run(self) -> None:
        """To the end of the input.

        Cancellation: lines that have their answer are in the output, whole; the others are not.

        Raises:
          EngineDeadError: the engine died for good. What was under way has no result.
          BatchFileError, BrokenPipeError: a file cannot be read or written. May be several, in a group.
        """
        good, errors = self.output.earlier.num_good, self.output.earlier.num_errors
        self.tally = Tally(good, errors, earlier=good + errors)
        send, receive = trio.open_memory_channel[BatchRequest](0)
        async with trio.open_nursery() as nursery:
            async with receive:
                for _ in range(self.concurrency):
                    nursery.start_soon(self._work, receive.clone(), nursery.cancel_scope)
            async with send:
                await self._read(send)
        if self.has_died():
            raise EngineDeadError("the engine core has died; the output has what was finished before")

    async def _read(self, send: trio.MemorySendChannel[BatchRequest]) -> None:
        try:
            while (line := await self.lines.read()) is not None:
                await self._take(line, send)
        except OSError as error:
            raise BatchFileError(f"cannot read the input: {error.strerror}.") from error

    async def _take(self, line: Line, send: trio.MemorySendChannel[BatchRequest]) -> None:
        """Hand on a request, unless it has its answer, or is none."""
        if line.content is not None and not line.content.strip():
            self.progress.count(1, 0, 0)
            return
        try:
            request = self._request_of(line)
        except WrongLineError as error:
            if line.number not in self.output.earlier.told:
                await self.output.write(Result.refused(error))
                self.tally.errors += 1
            self.progress.count(1, 0, 0)
            return
        if digest_of(request.custom_id) in self.output.earlier.answered:
            self.progress.count(1, 0, 0)
        else:
            await send.send(request)

    def _request_of(self, line: Line) -> BatchRequest:
        """Raises WrongLineError."""
        if line.content is None:
            raise WrongLineError(line.number, "line_too_long", "it is longer than a request's body may be.")
        request = parse_request(line.number, line.content)
        digest = digest_of(request.custom_id)
        if digest in self._seen:
            problem = "its custom_id is that of an earlier line."
            raise WrongLineError(line.number, "duplicate_custom_id", problem, request.custom_id)
        self._seen.add(digest)
        return request

    async def _work(
        self, requests: trio.MemoryReceiveChannel[BatchRequest], everything: trio.CancelScope
    ) -> None:
        async with requests:
            async for request in requests:
                reply = await self._ask(request)
                if self.has_died():  # which is no answer to this line
                    everything.cancel()
                    return
                await self._write(request, reply)

    async def _ask(self, request: BatchRequest) -> Reply:
        """The answer, once the application has room. An engine that restarts says how long that takes."""
        reply, retry_after = await self.application.ask(request)
        for _ in range(1, _MAX_ATTEMPTS):
            if retry_after is None or self.has_died():
                break
            await trio.sleep(retry_after)
            reply, retry_after = await self.application.ask(request)
        return reply

    async def _write(self, request: BatchRequest, reply: Reply) -> None:
        result = Result.answered(request, reply)
        await self.output.write(result)
        if result.is_good:
            self.tally.good += 1
        else:
            self.tally.errors += 1
        self.progress.count(1, *_tokens(reply))


@attrs.frozen
class _Usage:
    """Completions count the first two, responses the others."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


@attrs.frozen
class _Answer:
    usage: _Usage | None = None


def _tokens(reply: Reply) -> tuple[int, int]:
    """Of the input and of the output."""
    usage = msgspec.json.decode(reply.body, type=_Answer).usage or _Usage()
    return usage.prompt_tokens + usage.input_tokens, usage.completion_tokens + usage.output_tokens
