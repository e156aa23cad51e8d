"""The serving loop: listening sockets to connections, and a shutdown in three phases.

Stock hypercorn on trio lets one connection's exception end the server, does not see a client leave behind a
pipelined request, cannot cancel a blocked write, and leaves reused idle connections open. This loop keeps
hypercorn's handling of ASGI messages (`HTTPStream`), events and settings, and owns the rest: the accept loop
here, the connection in `connection.py`, HTTP/1.1 in `h11_protocol.py`, HTTP/2 in `h2_protocol.py`, the
request in `request_stream.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio
from hypercorn.config import Config
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from trioserve.server.connection import Connection
from trioserve.server.connection_room import ConnectionRoom
from trioserve.server.http_context import HttpLimits, ServingContext
from trioserve.server.lifespan import open_lifespan

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    from hypercorn.typing import ASGIFramework

    from trioserve.server.tls import Certificates

__all__ = ["HttpLimits", "serve_http"]


async def serve_http(
    app: ASGIFramework,
    listeners: Sequence[socket.socket],
    limits: HttpLimits,
    *,
    shutdown: trio.Event,
    access_log: bool,
    certificates: Certificates | None = None,
    count_refusal: Callable[[str], None] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` over HTTP until `shutdown` is set and the requests are done.

    `listeners` are bound, listening stream sockets, TCP or Unix; they are closed here in any case, and their
    paths left alone. With `certificates` they all speak TLS, and HTTP/2 if those say so; else HTTP/1.1 in
    clear text. `count_refusal` is told of each connection that is turned away, for want of "connections" or
    "address_connections". `task_status` tells that the application has started and connections are accepted.

    Shutdown: the listeners and idle connections are closed at once; running requests go on, and a further
    one on their connections gets 503 (on HTTP/2: REFUSED_STREAM, after a GOAWAY); what still runs after
    `limits.shutdown_timeout` is cancelled.

    Failures: an exception in a connection or in the application's handling of a request is logged under
    `trioserve.http`, and ends that connection or request only. Requests are logged under `trioserve.access`.

    Cancellation: everything is cancelled at once, the application's lifespan included.

    Raises (in an exception group):
      LifespanFailureError, LifespanTimeoutError: the application could not start, or not shut down.
      Exception: what the application's lifespan task raises at any time; what `accept` raises, unless it
        means that the process is short of file descriptors, when it is tried again.
    """
    context = _make_context(app, limits, access_log, certificates, count_refusal)
    sockets = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in listeners]

    async def serve_connection(stream: trio.SocketStream) -> None:
        await Connection(context, stream).run()

    lifespan = open_lifespan(context.app, context.state, limits.shutdown_timeout)
    with _closing(sockets):
        async with lifespan, trio.open_nursery() as connections:
            accept = partial(trio.serve_listeners, serve_connection, sockets, handler_nursery=connections)
            async with trio.open_nursery() as accepting:
                await accepting.start(accept)
                task_status.started()
                await shutdown.wait()
                accepting.cancel_scope.cancel()
            context.drain()
            connections.cancel_scope.deadline = trio.current_time() + limits.shutdown_timeout


@contextmanager
def _closing(listeners: Sequence[trio.SocketListener]) -> Iterator[None]:
    try:
        yield
    finally:
        for listener in listeners:
            listener.socket.close()


def _make_context(
    app: ASGIFramework,
    limits: HttpLimits,
    access_log: bool,
    certificates: Certificates | None = None,
    count_refusal: Callable[[str], None] | None = None,
) -> ServingContext:
    config = Config()
    config.include_server_header = False
    config.errorlog = None  # hypercorn would put a handler on its own logger
    return ServingContext(
        app=wrap_app(app, 0, "asgi"),
        config=config,
        limits=limits,
        state=ConnectionState({}),
        access_log=access_log,
        certificates=certificates,
        count_refusal=count_refusal,
        room=ConnectionRoom(limits.max_connections, limits.max_connections_per_address),
    )
