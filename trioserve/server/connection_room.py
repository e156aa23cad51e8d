"""How many connections are open, in all and from one address, and how many may be."""

from __future__ import annotations

import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.server.http_context import Address

__all__ = ["ConnectionRoom", "NoRoom", "raise_file_limit", "room_for_files"]

# File descriptors that are not for connections: the engine's link, listeners, event loops, log and model
# files, downloads, and what libraries open for a moment.
_RESERVED_FILES = 100


@attrs.frozen
class NoRoom:
    """Why a connection is turned away, for metrics, and as HTTP says it."""

    reason: str
    status: int
    message: str
    code: str


@attrs.define(eq=False)
class ConnectionRoom:
    """Counts the open connections. `None` is no limit.

    Clients are told apart by their IPv4 address, or by the first 64 bits of their IPv6 address: a single
    household or host commonly gets that many, so counting single IPv6 addresses would limit nobody. Unix
    sockets have no address, and count towards the total alone.
    """

    max_connections: int | None = None
    max_per_address: int | None = None
    num_open: int = 0
    # Only clients that have connections; so its size is bounded by theirs.
    _of_client: dict[bytes, int] = attrs.field(factory=dict)

    @contextmanager
    def place(self, address: Address) -> Iterator[NoRoom | None]:
        """A connection's place while the body runs; yields why, if there is none."""
        client = None if address is None else _client_of(address[0])
        refusal = self._refusal(client)
        if refusal is not None:
            yield refusal
            return
        self._count(client, 1)
        try:
            yield None
        finally:
            self._count(client, -1)

    def _refusal(self, client: bytes | None) -> NoRoom | None:
        if self.max_connections is not None and self.num_open >= self.max_connections:
            message = "The server has no room for another connection at present."
            return NoRoom("connections", 503, message, "overloaded")
        if client is None or self.max_per_address is None:
            return None
        if self._of_client.get(client, 0) < self.max_per_address:
            return None
        message = f"There are {self.max_per_address} connections from this address, and no more are allowed."
        return NoRoom("address_connections", 429, message, "rate_limit_exceeded")

    def _count(self, client: bytes | None, change: int) -> None:
        self.num_open += change
        if client is None:
            return
        count = self._of_client.get(client, 0) + change
        if count:
            self._of_client[client] = count
        else:
            del self._of_client[client]


def _client_of(host: str) -> bytes:
    if ":" not in host:
        return host.encode()
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    is_ipv4 = packed.startswith(bytes(10) + b"\xff\xff")  # as a socket for both protocols shows it
    return packed if is_ipv4 else packed[:8]


def raise_file_limit() -> None:
    """Let this process, and those it starts, open as many files as the system permits it."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - does not exist on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_files() -> int | None:
    """So many connections does the limit of open files leave room for; None if there is no such limit."""
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - does not exist on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(1, soft - _RESERVED_FILES)
