"""The engine core's process: `python -m trioserve.link.engine_process FD RUNNER`, started by `link.process`.

It lives as long as its end of the link: an end of file asks it to stop, a hangup ends it at once. Signals
from a terminal or a service manager go to the whole process group; what they mean is the parent's to
decide, so they are ignored here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

import trio

from trioserve.link.message_stream import MessageStream
from trioserve.link.parent_watch import dies_with_parent
from trioserve.settling import settle

__all__ = ["keep_openmp_from_spinning", "main"]


async def _serve(link: socket.socket, runner: str) -> bool:
    # After the watch has begun: what this imports takes half a second, most of which holds the GIL. Later,
    # packing weights and making the grammars' tokenizer can then go on side by side.
    with suppress(ImportError, OSError):  # comes again, where the client can be told
        if runner == "pooling":
            import trioserve.worker.pooling_runner  # noqa: PLC0415
        else:
            import trioserve.worker.model_runner  # noqa: F401, PLC0415
    from trioserve.link.core_server import serve_core  # noqa: PLC0415

    stream = MessageStream(trio.SocketStream(trio.socket.from_stdlib_socket(link)))
    try:
        return await serve_core(stream, on_ready=settle)
    finally:
        stream.close()


def keep_openmp_from_spinning() -> None:
    """OpenMP's threads spin while they wait for each other: milliseconds, by default. Where one of them has
    lost its processor to somebody else (the API process, for one), a step then takes twenty times as long.
    5,000 turns cost a tenth to a fifth of the speed on an idle machine (docs/performance.md). Before torch is
    loaded, and only if the user has not decided."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def main() -> int:
    """Serve until the link ends. Returns the exit code: 0 after an orderly end, 1 after a failure."""
    keep_openmp_from_spinning()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    link.setblocking(False)
    with dies_with_parent(link.fileno()):
        return 0 if trio.run(_serve, link, sys.argv[2]) else 1


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All scopes have been left. Taking the interpreter apart, with torch in it, takes longer than the parent
    # waits for an orderly end.
    os._exit(exit_code)
