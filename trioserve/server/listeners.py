"""The sockets a server listens on, bound before anything slow begins."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from typing import TYPE_CHECKING

from trioserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.server_args import ServerArgs

__all__ = ["bound_listener", "describe", "start_listening"]

_BACKLOG = 1024

# A client whose network has vanished says nothing, and nothing is sent to it while its request waits. So the
# kernel asks after so many seconds of silence, and again so often, and gives up after so many tries. What was
# sent and is not acknowledged, or is not read, ends a connection after as long.
_KEEPALIVE_IDLE = 30
_KEEPALIVE_INTERVAL = 10
_KEEPALIVE_TRIES = 3
_VANISHED_AFTER = _KEEPALIVE_IDLE + _KEEPALIVE_TRIES * _KEEPALIVE_INTERVAL


@contextlib.contextmanager
def bound_listener(args: ServerArgs) -> Iterator[socket.socket]:
    """A socket that is bound and does not listen yet: see `start_listening`.

    One that was inherited (`args.fd`) listens already, and whoever made it keeps its address. It is closed at
    the end like any other; other processes that have it too keep it, as a socket that does not block.

    Raises:
      InvalidConfigError: the address cannot be used.
    """
    if args.fd is not None:
        with _adopt(args.fd) as inherited:
            yield inherited
        return
    listener = _bind_unix(args.uds) if args.uds is not None else _bind_tcp(args.host, args.port)
    with listener:
        own_file = None if args.uds is None else _inode(_own_path(args.uds))
        try:
            yield listener
        finally:
            if args.uds is not None:
                for path in (_own_path(args.uds), args.uds):
                    if _inode(path) == own_file:  # another server may have taken over the path since
                        os.unlink(path)


def start_listening(listener: socket.socket, args: ServerArgs) -> None:
    """Let clients in. A Unix socket appears at its path only now.

    On Linux, TCP connections end when the client has been silent to the kernel's probes for a minute.

    Raises:
      InvalidConfigError: somebody else has begun to listen there meanwhile.
    """
    if listener.family != socket.AF_UNIX:
        _notice_vanished_clients(listener, args.write_timeout)
    if args.fd is not None:
        return
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(_BACKLOG)
        if args.uds is not None:
            _refuse_if_served(args.uds)
            os.rename(_own_path(args.uds), args.uds)
    except OSError as error:
        field, address = ("uds", args.uds) if args.uds is not None else ("port", args.port)
        raise InvalidConfigError(f"{field} {address} cannot be listened on: {error}.", field=field) from error


def _notice_vanished_clients(listener: socket.socket, write_timeout: float) -> None:
    """Connections inherit these settings; on Linux, that is. Elsewhere the system's own hold."""
    if sys.platform != "linux":
        return
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel's patience with one that does not read is not to be less than ours.
    vanished_after = min(max(_VANISHED_AFTER, write_timeout), 2**31 / 1000 - 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE),
        (socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL),
        (socket.TCP_KEEPCNT, _KEEPALIVE_TRIES),
        (socket.TCP_USER_TIMEOUT, int(vanished_after * 1000)),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise InvalidConfigError(f"host {host!r} cannot be resolved: {error}.", field="host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # It lets us bind beside what a server before left in TIME_WAIT. Left on, it would let the next server
        # bind this port too, as long as nobody listens; `start_listening` sets it again, for connections
        # inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise InvalidConfigError(
            f"port {port} on {host} cannot be listened on: {error.strerror}.", field="port"
        ) from error
    return listener


def _bind_unix(path: str) -> socket.socket:
    """Bound beside `path`, under a name of this process's own."""
    listener = socket.socket(socket.AF_UNIX)
    own_path = _own_path(path)
    try:
        _refuse_if_served(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own_path)  # of a killed server with the same pid
        listener.bind(own_path)
    except OSError as error:
        listener.close()
        raise InvalidConfigError(f"uds {path!r} cannot be listened on: {error}.", field="uds") from error
    return listener


def _adopt(fd: int) -> socket.socket:
    """A listening socket that the process was started with."""
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise InvalidConfigError(f"fd {fd} is not an open socket: {error.strerror}.", field="fd") from error
    listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listener.type is not socket.SOCK_STREAM or not listens:
        listener.detach()  # not ours to close
        raise InvalidConfigError(f"fd {fd} must be a stream socket that listens.", field="fd")
    listener.setblocking(False)
    os.set_inheritable(fd, False)
    return listener


def _own_path(path: str) -> str:
    return f"{path}.{os.getpid()}"


def _refuse_if_served(path: str) -> None:
    """What a killed server left behind may be replaced; a socket that somebody serves, or a file, may not.

    Raises:
      OSError: it may not.
    """
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(path)
        raise OSError(errno.EADDRINUSE, "another server listens there")


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def describe(listener: socket.socket, args: ServerArgs) -> str:
    """Where a client finds it."""
    address = listener.getsockname()
    if isinstance(address, tuple):
        host, port = address[:2]
        scheme = "http" if args.ssl_certfile is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    tls = "" if args.ssl_certfile is None else " (TLS)"
    return f"unix:{args.uds or os.fsdecode(address)}{tls}"
