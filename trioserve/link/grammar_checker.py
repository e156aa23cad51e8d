"""Checks grammars in a child process, out of whose way the engine core is."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.errors import EngineGenerateError
from trioserve.grammars.checking import Verdict
from trioserve.grammars.refusals import refusal
from trioserve.link.framing import FrameReader, frame
from trioserve.link.process import EngineProcess, describe_exit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioserve.grammars.checking import Setup
    from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["GrammarChecker"]

_MAX_SIZE = 2**20
"""Bytes of a request's parameters."""

_STARTUP_TIMEOUT = 60.0
"""Seconds for imports and the tokenizer: 0.8 s for 49 k tokens, 4 s for 262 k."""

_REAP_TIMEOUT = 10.0
"""Seconds for a killed process to be gone; only one in an uninterruptible wait takes that long."""


class _Child:
    """A running grammar process."""

    def __init__(self) -> None:
        self._process = EngineProcess("trioserve.link.grammar_process")
        self._stream = trio.SocketStream(self._process.socket)
        self._frames = FrameReader(self._stream)

    async def exchange(self, body: bytes) -> bytes | None:
        """The answer to a frame; None if the child ended instead."""
        try:
            await self._stream.send_all(frame(body))
            return await self._frames.receive()
        except trio.BrokenResourceError:
            return None

    async def kill(self) -> str:
        """Also a child that is dead already is reaped. Returns how it ended, in words."""
        self._process.kill()
        self._stream.socket.close()
        return describe_exit(await self._process.wait())


class GrammarChecker:
    """Owns the child (`trioserve.link.grammar_process`), which is started for the first check.

    One check at a time: who calls `check` sees to that.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._child: _Child | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, setup: Setup) -> AsyncIterator[GrammarChecker]:
        """Leaving the scope ends the child, if there is one, whatever it does."""
        checker = cls(setup)
        try:
            yield checker
        finally:
            with trio.move_on_after(_REAP_TIMEOUT, shield=True):
                await checker._stop()

    async def check(self, params: StructuredOutputsParams) -> Verdict:
        """Takes at most the time limit (`config.compile_timeout`) and, for the first check, the child's
        start. Cancelling kills the child.

        Raises:
          EngineGenerateError: the child does not start, or has been killed.
        """
        body = msgspec.msgpack.encode(params)
        if len(body) > _MAX_SIZE:
            reason = f"it has {len(body)} bytes, at most {_MAX_SIZE} are allowed."
            return Verdict(refused=str(refusal(reason)))
        child = self._child or await self._start()
        answer = await self._exchange(child, body)
        return msgspec.msgpack.decode(answer, type=Verdict)

    async def _start(self) -> _Child:
        try:
            self._child = child = _Child()
        except OSError as error:  # no memory, or too many processes or files
            raise EngineGenerateError(f"Checking grammars did not start: {error}") from error
        with trio.move_on_after(_STARTUP_TIMEOUT):
            await self._exchange(child, msgspec.msgpack.encode(self._setup))
            return child
        raise EngineGenerateError(f"Checking grammars did not start in {_STARTUP_TIMEOUT:g} seconds.")

    async def _exchange(self, child: _Child, body: bytes) -> bytes:
        """The child's answer. A child that gives none is out of step with us, or dead: it is not kept."""
        answer = None
        ending = "it could not be killed"
        try:
            answer = await child.exchange(body)
        finally:
            if answer is None:
                with trio.move_on_after(_REAP_TIMEOUT, shield=True):
                    ending = await self._stop()
        if answer is None:
            raise EngineGenerateError(f"The process that checks grammars has ended ({ending}).")
        return answer

    async def _stop(self) -> str:
        """Returns how the child ended, in words."""
        child, self._child = self._child, None
        return "there was none" if child is None else await child.kill()
