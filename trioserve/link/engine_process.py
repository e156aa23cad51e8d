"""The engine core's process: `python -m trioserve.link.engine_process FD`, started by `link.process` only.

It lives as long as its end of the link: an end of file asks it to stop, a hangup ends it at once. Signals
from a terminal or a service manager go to the whole process group; what they mean is the parent's to
decide, so they are ignored here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import trio

from trioserve.link.message_stream import MessageStream
from trioserve.link.parent_watch import dies_with_parent

__all__ = ["main"]


async def _serve(link: socket.socket) -> bool:
    # After the watch has begun: what this imports takes a second or two.
    from trioserve.link.core_server import serve_core  # noqa: PLC0415

    stream = MessageStream(trio.SocketStream(trio.socket.from_stdlib_socket(link)))
    try:
        return await serve_core(stream)
    finally:
        stream.close()


def main() -> int:
    """Serve until the link ends. Returns the exit code: 0 after an orderly end, 1 after a failure."""
    # Before anything loads OpenMP. Its threads would spin while they wait for each other, and where one of
    # them has lost its processor to somebody else (this machine also serves HTTP), a step takes ten times
    # as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    link.setblocking(False)
    with dies_with_parent(link.fileno()):
        return 0 if trio.run(_serve, link) else 1


if __name__ == "__main__":
    sys.exit(main())
