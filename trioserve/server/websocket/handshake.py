"""The request with which a WebSocket begins: RFC 6455, section 4.2."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING

import attrs
from wsproto.utilities import generate_accept_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    import h11

__all__ = ["Handshake", "Refusal", "asks_for_websocket", "read_handshake"]

_VERSION = b"13"
_KEY_BYTES = 16

# What a 426 must say (RFC 9110, section 15.5.22).
_UPGRADE = ((b"connection", b"upgrade"), (b"upgrade", b"websocket"), (b"sec-websocket-version", _VERSION))


@attrs.frozen
class Refusal:
    """Why there will be no WebSocket, as HTTP says it."""

    status: int
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


@attrs.frozen
class Handshake:
    """One that can be accepted."""

    key: bytes = attrs.field(repr=False)
    subprotocols: tuple[str, ...] = attrs.field(repr=False)  # a key of the API may be among them

    def accept(self, subprotocol: str | None) -> list[tuple[bytes, bytes]]:
        """The headers of the 101. No extension is ever agreed on.

        Raises:
          ValueError: the client has not offered this subprotocol.
        """
        headers = [
            (b"upgrade", b"websocket"),
            (b"connection", b"Upgrade"),
            (b"sec-websocket-accept", generate_accept_token(self.key)),
        ]
        if subprotocol is not None:
            if subprotocol not in self.subprotocols:
                raise ValueError(f"the client has not offered the subprotocol {subprotocol!r}")
            headers.append((b"sec-websocket-protocol", subprotocol.encode("latin-1")))
        return headers


def asks_for_websocket(request: h11.Request) -> bool:
    """Whether this is a handshake, a right one or not. Anything else with an `Upgrade` is a request as any
    other, as the standard allows (RFC 9110, section 7.8)."""
    return (
        request.method == b"GET"
        and request.http_version == b"1.1"
        and b"websocket" in {token.lower() for token in _tokens(request, b"upgrade")}
        and b"upgrade" in {token.lower() for token in _tokens(request, b"connection")}
    )


def read_handshake(request: h11.Request) -> Handshake | Refusal:
    """What to make of a request that asks for a WebSocket."""
    if list(_values(request, b"sec-websocket-version")) != [_VERSION]:
        message = "The header Sec-WebSocket-Version must be 13."
        return Refusal(426, message, _UPGRADE)
    keys = list(_values(request, b"sec-websocket-key"))
    if len(keys) != 1 or not _is_key(keys[0]):
        return Refusal(400, "The header Sec-WebSocket-Key must be 16 bytes in base64.")
    lengths = set(_values(request, b"content-length"))
    if lengths - {b"0"} or any(_values(request, b"transfer-encoding")):
        return Refusal(400, "The handshake of a WebSocket has no body.")
    return Handshake(
        keys[0], tuple(token.decode("latin-1") for token in _tokens(request, b"sec-websocket-protocol"))
    )


def _is_key(key: bytes) -> bool:
    try:
        return len(binascii.a2b_base64(key, strict_mode=True)) == _KEY_BYTES
    except binascii.Error:
        return False


def _values(request: h11.Request, name: bytes) -> Iterator[bytes]:
    return (value for given, value in request.headers if given == name)


def _tokens(request: h11.Request, name: bytes) -> Iterator[bytes]:
    """Of all headers of this name, which hold lists."""
    for value in _values(request, name):
        yield from filter(None, (token.strip() for token in value.split(b",")))
