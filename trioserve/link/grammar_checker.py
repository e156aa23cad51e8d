"""Checks grammars in a child process, which may crash or be killed without harm to the engine core."""

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
"""Seconds for imports and the tokenizer: 0.6 s for 49 k tokens, 3 s for 262 k."""

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
        with trio.CancelScope(shield=True, relative_deadline=_REAP_TIMEOUT):
            return describe_exit(await self._process.wait())
        return "it could not be killed"


class GrammarChecker:
    """Owns the child: started for the first check, and again after one that it did not survive.

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
            await checker._stop()

    async def check(self, params: StructuredOutputsParams) -> Verdict:
        """Takes at most the time limit (`config.compile_timeout`) and, where it has to be started, the
        child's start. Cancelling kills the child.

        Raises:
          EngineGenerateError: the child does not start.
        """
        body = msgspec.msgpack.encode(params)
        if len(body) > _MAX_SIZE:
            return _refused(f"it has {len(body)} bytes, at most {_MAX_SIZE} are allowed.")
        child = self._child or await self._start()
        timeout = self._setup.config.compile_timeout
        answer = None
        try:
            with trio.move_on_after(timeout) as limit:
                answer = await child.exchange(body)
        finally:
            ending = await self._stop() if answer is None else ""
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=Verdict)
        if limit.cancelled_caught:
            return _refused(
                f"it is too complex: it did not compile within {timeout:g} seconds "
                "(--structured-outputs-config.compile_timeout)."
            )
        return _refused(f"it is too complex: compiling it ended in a crash ({ending}).")

    async def _start(self) -> _Child:
        self._child = child = _Child()
        ready = None
        try:
            with trio.move_on_after(_STARTUP_TIMEOUT):
                ready = await child.exchange(msgspec.msgpack.encode(self._setup))
        finally:
            ending = await self._stop() if ready is None else ""
        if ready is None:
            raise EngineGenerateError(f"The process that checks grammars did not start ({ending}).")
        return child

    async def _stop(self) -> str:
        """Returns how the child ended, in words."""
        child, self._child = self._child, None
        return "there was none" if child is None else await child.kill()


def _refused(reason: str) -> Verdict:
    return Verdict(refused=str(refusal(reason)))
