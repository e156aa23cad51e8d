"""The sockets a server listens on, bound before anything slow begins."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import TYPE_CHECKING

from trioserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.args import ServerArgs

__all__ = ["bound_listener", "describe"]

_BACKLOG = 1024


@contextlib.contextmanager
def bound_listener(args: ServerArgs) -> Iterator[socket.socket]:
    """A socket that is bound and does not listen yet; a Unix socket's file is removed on leaving.

    Raises:
      InvalidConfigError: the address cannot be used.
    """
    listener = _bind_unix(args.uds) if args.uds is not None else _bind_tcp(args.host, args.port)
    with listener:
        try:
            yield listener
        finally:
            if args.uds is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(args.uds)


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
    except OSError as error:
        listener.close()
        raise InvalidConfigError(
            f"port {port} on {host} cannot be listened on: {error.strerror}.", field="port"
        ) from error
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale_socket(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise InvalidConfigError(f"uds {path!r} cannot be listened on: {error}.", field="uds") from error
    return listener


def _remove_stale_socket(path: str) -> None:
    """What a killed server left behind; a socket that somebody still serves is left alone."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def start_listening(listener: socket.socket) -> None:
    listener.listen(_BACKLOG)


def describe(listener: socket.socket) -> str:
    """Where a client finds it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
