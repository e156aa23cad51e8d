"""What the connections of one HTTP server share: limits, the application, logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

import attrs
import msgspec
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState

from trioserve.server.connection_room import ConnectionRoom, room_for_files
from trioserve.server.error_envelopes import error_object
from trioserve.server.protocol.errors import ErrorDetail
from trioserve.server.tls import Certificates

if TYPE_CHECKING:
    from trioserve.server_args import ServerArgs

__all__ = [
    "MAX_DISCARD",
    "Address",
    "FailureLog",
    "HttpLimits",
    "ServingContext",
    "error_body",
    "format_address",
]

MAX_DISCARD = 64 * 1024 * 1024
"""So much of an unwanted body is read, in bytes, so that its sender gets to read why it is unwanted."""

Address = tuple[str, int] | None
"""Host and port; None for a Unix socket."""

_access = logging.getLogger("trioserve.access")
_logger = logging.getLogger("trioserve.http")


@attrs.frozen(kw_only=True)
class HttpLimits:
    """Bounds on what one client can take. Times in seconds."""

    keep_alive_timeout: float = 5.0
    """A connection that waits for a request, or for the rest of a request's headers, is closed after this."""

    write_timeout: float = 30.0
    """A response of which the kernel took no byte for so long is given up."""

    shutdown_timeout: float = 30.0
    """Requests that run when the shutdown begins are cancelled after this."""

    max_header_bytes: int = 64 * 1024
    """A request's headers may be this long; longer ones are answered with 431."""

    max_pipelined_bytes: int = 64 * 1024
    """A client that has sent more than this ahead, while its request runs, is disconnected.

    Looked at when more comes, so what one read (64 KiB) brought together with the request may be above it.
    """

    max_body_size: int = 16 * 1024 * 1024
    """Bytes; a longer body is answered with 413, and a longer message of a WebSocket ends it."""

    websocket_ping_interval: float = 20.0
    """The client of a WebSocket that was silent for so long gets a ping. 0: never."""

    websocket_ping_timeout: float = 20.0
    """One that is then silent for so long is gone."""

    handshake_timeout: float = 10.0
    """A TLS connection whose handshake takes longer is closed."""

    max_streams: int = 100
    """Requests that may run at a time on one HTTP/2 connection."""

    max_connections: int | None = None
    """Further ones are turned away: HTTP 503 on clear text, closed without a word on TLS. None: no limit."""

    max_connections_per_address: int | None = None
    """The same, of one client; HTTP 429 on clear text."""

    @classmethod
    def from_args(cls, args: ServerArgs) -> HttpLimits:
        """Without `max_connections`, as many as the limit of open files, at this moment, has room for."""
        return cls(
            keep_alive_timeout=args.keep_alive_timeout,
            write_timeout=args.write_timeout,
            shutdown_timeout=args.shutdown_timeout,
            max_header_bytes=args.max_header_size,
            max_body_size=args.max_body_size,
            websocket_ping_interval=args.websocket_ping_interval,
            websocket_ping_timeout=args.websocket_ping_timeout,
            max_connections=args.max_connections or room_for_files(),
            max_connections_per_address=args.max_connections_per_address,
        )


@attrs.define(eq=False)
class FailureLog:
    """Logs what clients can cause: `burst` lines at once, then one a second, and how many were left out."""

    burst: int = 10
    level: int = logging.ERROR
    _spent: float = 0.0
    _seen: float = 0.0
    _left_out: int = 0

    def report(self, message: str, *arguments: object, error: BaseException | None = None) -> None:
        """Log `message % arguments`, with the traceback of `error` if there is one. Never waits."""
        now = time.monotonic()
        self._spent = max(0.0, self._spent - (now - self._seen))
        self._seen = now
        if self._spent > self.burst - 1:
            self._left_out += 1
            return
        self._spent += 1
        if self._left_out:
            message += f" ({self._left_out} such failures before this one were not logged)"
            self._left_out = 0
        _logger.log(self.level, message, *arguments, exc_info=error)


class Drainable(Protocol):
    def drain(self) -> None:
        """Close now if idle; else after the request that runs. Never waits."""


@attrs.define(eq=False, kw_only=True)
class ServingContext:
    """One per server."""

    app: AppWrapper
    config: Config
    limits: HttpLimits
    state: ConnectionState
    access_log: bool
    certificates: Certificates | None = None
    """None: clear text."""
    room: ConnectionRoom = attrs.field(factory=ConnectionRoom)
    failures: FailureLog = attrs.field(factory=FailureLog)
    turned_away: FailureLog = attrs.field(factory=lambda: FailureLog(level=logging.WARNING))
    """Apart from `failures`: so that many connections too many hide no failure."""
    count_refusal: Callable[[str], None] | None = None
    """Told of each connection that is turned away: for want of "connections" or "address_connections"."""
    worker: WorkerContext = attrs.field(factory=lambda: WorkerContext(None))
    connections: set[Drainable] = attrs.field(factory=set)
    """The open ones; `room` bounds their number."""
    draining: bool = False
    """Set once, when the shutdown begins."""

    def drain(self) -> None:
        """Begin the shutdown: no further request is served."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()

    def log_access(self, method: str, path: str, status: int, seconds: float, peer: Address) -> None:
        """One line per request. `path` is as the client wrote it, without the query."""
        if self.access_log:
            _access.info("%s %s %d %.1f ms %s", method, path, status, seconds * 1e3, format_address(peer))


def format_address(address: Address) -> str:
    """For logs."""
    if address is None:
        return "unix"
    host, port = address
    return f"{host}:{port}"


_CODES = {413: "request_too_large", 431: "headers_too_large", 503: "shutting_down"}


def error_body(status: int, message: str | None = None, code: str | None = None, *, path: str = "") -> bytes:
    """An error object of the API that `path` (without the query) belongs to, as JSON."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "requests"  # as `errors.rate_limited`
    detail = ErrorDetail(message or HTTPStatus(status).phrase, kind, None, code or _CODES.get(status))
    return msgspec.json.encode(error_object(path, status, detail))
