"""Frames over a byte stream: four bytes of length (little-endian), then that many bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from trioserve.link.messages import CutOffError, MessageError

if TYPE_CHECKING:
    import trio

__all__ = ["MAX_FRAME_SIZE", "FrameReader", "frame"]

MAX_FRAME_SIZE = 256 * 2**20
"""More than any message needs; a length beyond it means that the stream is out of step."""

_LENGTH = struct.Struct("<I")
_RECEIVE_SIZE = 256 * 2**10


def frame(body: bytes) -> bytes:
    """`body` with its length before it."""
    if len(body) > MAX_FRAME_SIZE:
        raise MessageError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_SIZE}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Takes frames off a stream; one receive may bring many, and one frame may need many."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def receive(self) -> bytes | None:
        """The next frame's body, or None at the end of the stream.

        A checkpoint only where it has to wait. Cancelling loses nothing: a frame that was cut is completed
        by the next call.

        Raises:
          MessageError: the length is impossible.
          CutOffError: the stream ended inside a frame.
          trio.BrokenResourceError: the stream broke.
        """
        while (body := self._next_body()) is None:
            data = await self._stream.receive_some(_RECEIVE_SIZE)
            if not data:
                if self._buffer:
                    raise CutOffError(f"the stream ended inside a frame ({len(self._buffer)} bytes of it)")
                return None
            self._buffer += data
        return body

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > MAX_FRAME_SIZE:
            raise MessageError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_SIZE}")
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return body
