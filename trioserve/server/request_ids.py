"""The id of a request, by which its client may name it (X-Request-Id)."""

from __future__ import annotations

__all__ = ["MAX_REQUEST_ID", "REQUEST_ID_HEADER", "is_request_id"]

REQUEST_ID_HEADER = b"x-request-id"

MAX_REQUEST_ID = 256
"""Characters."""


def is_request_id(text: str) -> bool:
    """Whether it may go into a header and into the log: one line of visible ASCII."""
    return 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()
