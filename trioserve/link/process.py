"""An engine core in a child process, owned by a scope."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trioserve.errors import EngineStartError
from trioserve.link.client import EngineCoreClient, shake_hands
from trioserve.link.message_stream import MessageStream
from trioserve.nurseries import end_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.link.messages import Ready

__all__ = ["EngineProcess", "describe_exit", "open_process_client"]

_SHUTDOWN_GRACE = 0.25
"""Seconds between closing the link and SIGKILL. An idle core needs some milliseconds; one in the middle of a
long step has nothing to lose either."""

_REAP_TIMEOUT = 10.0
"""Seconds for all of it; only a process in an uninterruptible wait takes longer to die."""


class EngineProcess:
    """The child (`python -m MODULE FD`, with its end of a socket), from its start until it has been reaped.

    It is started by `subprocess.Popen` in the loop's own thread, which blocks for a few milliseconds: trio
    would fork in a worker thread, and a parent-death signal follows the thread that forked.
    """

    def __init__(self, module: str = "trioserve.link.engine_process") -> None:
        near, far = socket.socketpair()
        with far:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", module, str(far.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # the parent's stdout may carry somebody's data
                    pass_fds=[far.fileno()],
                )
            except BaseException:
                near.close()
                raise
        near.setblocking(False)
        self.socket = trio.socket.from_stdlib_socket(near)

    async def wait(self) -> int:
        """Wait for the end and reap the child; cancelling leaves it running. Returns the exit status."""
        while (status := self._child.poll()) is None:
            # pidfd_open cannot hit another process: until poll() reaps it, the pid is the child's.
            pidfd = os.pidfd_open(self._child.pid)
            try:
                await trio.lowlevel.wait_readable(pidfd)
            finally:
                os.close(pidfd)
        return status

    async def stop(self) -> None:
        """See the child to its end: the link has told it; after a grace period, SIGKILL."""
        with trio.move_on_after(_SHUTDOWN_GRACE):
            await self.wait()
            return
        self._child.kill()
        await self.wait()

    def kill(self) -> None:
        self._child.kill()


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


@asynccontextmanager
async def open_process_client(config: EngineConfig, model: ResolvedModel) -> AsyncIterator[EngineCoreClient]:
    """A client of an engine core in a new child process; leaving the scope ends the process.

    Raises:
      EngineStartError: it did not become ready, with the reason.
    """
    process = EngineProcess()
    stream = MessageStream(trio.SocketStream(process.socket))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run_writer)
            try:
                ready = await _start(process, stream, config, model)
                yield EngineCoreClient(stream, ready)
            finally:
                # A half-close asks the core to end; if it does not, stop() kills it.
                stream.shut_down_sending()
                with trio.CancelScope(shield=True, relative_deadline=_REAP_TIMEOUT):
                    await process.stop()
            end_nursery(nursery)
    finally:
        stream.close()


async def _start(
    process: EngineProcess, stream: MessageStream, config: EngineConfig, model: ResolvedModel
) -> Ready:
    try:
        with trio.fail_after(config.startup_timeout):
            return await shake_hands(stream, config, model)
    except trio.TooSlowError:
        process.kill()
        raise EngineStartError(
            f"The engine core was not ready after {config.startup_timeout:g} seconds (--startup-timeout)."
        ) from None
    except EngineStartError as error:
        with trio.move_on_after(1):
            raise EngineStartError(f"{error} ({describe_exit(await process.wait())})") from error.__cause__
        raise
