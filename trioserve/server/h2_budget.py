"""What a client may cost on one HTTP/2 connection beside its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SMALL_DATA", "FloodError", "FrameBudget"]

_PREFACE_SIZE = 24  # RFC 9113, section 3.4
_HEAD_SIZE = 9  # RFC 9113, section 4.1
_DATA, _HEADERS, _CONTINUATION = 0, 1, 9

SMALL_DATA = 64
"""Clients that send a body in smaller parts than this, in bytes, pay for each; or that make us do so."""

# The account: so many frames at once, and so many more in each second.
_BURST = 1000.0
_PER_SECOND = 100.0

# What our own sending makes clients send: window updates for the stream and for the connection.
_PER_DATA_FRAME = 2.0
_PER_RESPONSE = 10.0


class FloodError(Exception):
    """The client sends more than it has a use for."""


@attrs.define(eq=False)
class FrameBudget:
    """Counts frames before they are parsed, so that a flood costs next to nothing.

    Free are HEADERS, whose number `HttpLimits.max_streams` bounds, and DATA of 64 bytes and more, which flow
    control bounds. All else costs one: PING, SETTINGS, RST_STREAM, PRIORITY, WINDOW_UPDATE, CONTINUATION,
    small DATA, frames of unknown types. An account holds 1,000 at most, gets 100 a second, 2 for each DATA
    frame that is sent (unless the client's window made it a small one) and 10 for each response. A header
    block may be as long as the headers it stands for.
    """

    _max_header_block: int
    _account: float = _BURST
    _counted_at: float = attrs.field(factory=trio.current_time)
    _head: bytes = b""  # the part that is there of a frame's head
    _skip: int = _PREFACE_SIZE  # bytes until the next frame's head
    _header_block: int = 0

    def charge(self, data: bytes) -> None:
        """Take note of bytes from the client.

        Raises:
          FloodError: the account is empty, or a header block is too long.
        """
        now = trio.current_time()
        self._earn((now - self._counted_at) * _PER_SECOND)
        self._counted_at = now
        for kind, length in self._frames(data):
            if kind in {_HEADERS, _CONTINUATION}:
                self._header_block = length + (self._header_block if kind == _CONTINUATION else 0)
            if kind != _HEADERS and not (kind == _DATA and length >= SMALL_DATA):
                self._account -= 1
            if self._account < 0 or self._header_block > self._max_header_block:
                raise FloodError

    def data_frame_sent(self) -> None:
        self._earn(_PER_DATA_FRAME)

    def response_ended(self) -> None:
        self._earn(_PER_RESPONSE)

    def _earn(self, amount: float) -> None:
        self._account = min(_BURST, self._account + amount)

    def _frames(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Type and length of each frame whose head is complete."""
        position = self._skip
        while position < len(data):
            missing = _HEAD_SIZE - len(self._head)
            self._head += data[position : position + missing]
            position += missing
            if len(self._head) < _HEAD_SIZE:
                break
            length = int.from_bytes(self._head[:3], "big")
            yield self._head[3], length
            self._head = b""
            position += length
        self._skip = max(0, position - len(data)) if not self._head else 0
