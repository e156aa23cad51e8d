"""The id of a request, by which its client may name it (X-Request-Id)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MAX_REQUEST_ID", "REQUEST_ID_HEADER", "given_request_id", "is_request_id"]

REQUEST_ID_HEADER = b"x-request-id"

MAX_REQUEST_ID = 256
"""Characters."""


def is_request_id(text: str) -> bool:
    """Whether it may go into a header and into the log: one line of visible ASCII."""
    return 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()


def given_request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """As the client gave it, if it may be said back; else empty. The names are in lower case."""
    given = next((value for name, value in headers if name == REQUEST_ID_HEADER), b"")
    return given if is_request_id(given.decode("latin-1")) else b""
