"""An engine core in a child process, owned by a scope."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from trioserve.errors import EngineStartError
from trioserve.link.client import EngineCoreClient, shake_hands
from trioserve.link.message_stream import MessageStream
from trioserve.nurseries import end_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.link.messages import Ready

__all__ = ["EngineProcess", "describe_exit", "open_process_client"]

_SHUTDOWN_GRACE = 0.25
"""Seconds between closing the link and SIGKILL. An idle core needs some milliseconds; one in the middle of a
long step has nothing to lose either."""

_REAP_TIMEOUT = 10.0
"""Seconds for all of it; only a process in an uninterruptible wait takes longer to die."""

_ORDERLY = 0
"""The exit status of a core that was asked to end."""


class EngineProcess:
    """The child (`python -m MODULE FD [ARG]`, with its end of a socket), from its start until it has been
    reaped.

    It is started by `subprocess.Popen` in the loop's own thread, which blocks for a few milliseconds: trio
    would fork in a worker thread, and a parent-death signal follows the thread that forked.
    """

    def __init__(self, module: str, *args: str) -> None:
        """Raises OSError: the system has no process, memory or file descriptor left."""
        near, far = socket.socketpair()
        with far:
            try:
                self._child = _start_child(module, far.fileno(), args)
                # Open from the start, so that reaping works where no file descriptor is left. -1 once reaped.
                self._pidfd = _open_pidfd(self._child)
            except BaseException:
                near.close()
                raise
        near.setblocking(False)
        self.socket = trio.socket.from_stdlib_socket(near)

    async def wait(self) -> int:
        """Wait for the end and reap the child; cancelling leaves it running. Returns the exit status."""
        while (status := self._child.poll()) is None:
            await trio.lowlevel.wait_readable(self._pidfd)
        self.forget()
        return status

    async def stop(self) -> str | None:
        """See the child to its end: the link has told it; after a grace period, SIGKILL.

        Returns how it ended, in words, if that was neither in order nor by this."""
        with trio.move_on_after(_SHUTDOWN_GRACE):
            status = await self.wait()
            return None if status == _ORDERLY else describe_exit(status)
        self._child.kill()
        await self.wait()
        return None

    def kill(self) -> None:
        self._child.kill()

    def forget(self) -> None:
        """Wait for it no more: it has been reaped, or cannot be."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _start_child(module: str, link_fd: int, args: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, str(link_fd), *args],
        stdin=subprocess.DEVNULL,
        stdout=2,  # the parent's stdout may carry somebody's data
        pass_fds=[link_fd],
    )


def _open_pidfd(child: subprocess.Popen[bytes]) -> int:
    """It cannot mean another process: until `poll()` reaps the child, the pid is the child's."""
    try:
        return os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.wait()
        raise


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
    try:
        process = EngineProcess("trioserve.link.engine_process", model.runner)
    except OSError as error:
        raise EngineStartError(f"The engine core's process could not be started: {error}") from error
    stream = MessageStream(trio.SocketStream(process.socket))
    client: EngineCoreClient | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run_writer)
            try:
                ready = await _start(process, stream, config, model)
                client = EngineCoreClient(stream, ready, reap=partial(_reap, process))
                yield client
            finally:
                # A half-close asks the core to end; if it does not, stop() kills it.
                stream.shut_down_sending()
                with trio.CancelScope(shield=True, relative_deadline=_REAP_TIMEOUT):
                    ending = await process.stop()
                    if client is not None:
                        client.ended_by_itself = ending
            end_nursery(nursery)
    finally:
        process.forget()
        stream.close()


async def _reap(process: EngineProcess) -> str:
    """See a core to its end that serves nobody any more. How it ended, in words; cancelling leaves the rest
    to the scope that owns it."""
    with trio.move_on_after(_SHUTDOWN_GRACE):
        return describe_exit(await process.wait())
    process.kill()
    with trio.move_on_after(_REAP_TIMEOUT):
        await process.wait()
        return "it had to be killed"
    return "it cannot be killed"


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
