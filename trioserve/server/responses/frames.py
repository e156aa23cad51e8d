"""Events as bytes: WHATWG HTML, section 9.2.6, with the event's type as its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from trioserve.server.protocol.responses_events import ResponseEvent

__all__ = ["event_frame"]

_encode = msgspec.json.Encoder().encode


def event_frame(event: ResponseEvent) -> bytes:
    """The frame of one of `protocol.responses_events`; JSON has no line breaks, so it is three lines."""
    return b"event: " + event.type.encode() + b"\ndata: " + _encode(event) + b"\n\n"
