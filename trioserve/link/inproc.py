"""An engine core in the caller's own process: for debugging, and for embedders who want one process.

Everything but the process is the same: the core is served over a socket pair, by a task instead of a child.
"""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trioserve.errors import EngineStartError
from trioserve.link.client import EngineCoreClient, shake_hands
from trioserve.link.core_server import serve_core
from trioserve.link.message_stream import MessageStream
from trioserve.nurseries import end_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioserve.config import EngineConfig, ResolvedModel

__all__ = ["open_inproc_client"]


def _message_stream(end: socket.socket) -> MessageStream:
    end.setblocking(False)
    return MessageStream(trio.SocketStream(trio.socket.from_stdlib_socket(end)))


async def _serve(stream: MessageStream) -> None:
    try:
        await serve_core(stream)
    finally:
        stream.close()


@asynccontextmanager
async def open_inproc_client(config: EngineConfig, model: ResolvedModel) -> AsyncIterator[EngineCoreClient]:
    """A client of an engine core that runs in this scope; leaving it waits for the step that runs.

    Raises:
      EngineStartError: it did not become ready, with the reason.
    """
    try:
        near, far = map(_message_stream, socket.socketpair())
    except OSError as error:
        raise EngineStartError(f"The engine core's link could not be opened: {error}") from error
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve, far)
            nursery.start_soon(near.run_writer)
            try:
                with trio.fail_after(config.startup_timeout):
                    ready = await shake_hands(near, config, model)
            except trio.TooSlowError:
                raise EngineStartError(
                    f"The engine core was not ready after {config.startup_timeout:g} seconds."
                ) from None
            yield EngineCoreClient(near, ready)
            end_nursery(nursery)
    finally:
        near.close()
