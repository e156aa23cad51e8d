"""The lines of a file that may be larger than memory, or of a pipe."""

from __future__ import annotations

import os
import stat
from functools import partial

import attrs
import trio

__all__ = ["Line", "LineReader", "count_lines", "is_regular"]

_CHUNK = 2**18
"""Bytes read at a time."""


@attrs.frozen
class Line:
    number: int
    """From 1 on."""
    start: int
    """Bytes before it."""
    content: bytes | None
    """Without the end of line; None if it is longer than was allowed."""
    is_ended: bool
    """False only of a last one that no end of line follows."""


def is_regular(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


async def count_lines(fd: int) -> int | None:
    """Those of a regular file, from its beginning, or None. The position of `fd` stays where it is.

    Cancellation: let in between pieces of the file.
    """
    if not is_regular(fd):
        return None
    count = position = 0
    last = b"\n"
    while chunk := await trio.to_thread.run_sync(os.pread, fd, _CHUNK, position):
        count += chunk.count(b"\n")
        position += len(chunk)
        last = chunk[-1:]
    return count + (last != b"\n")


@attrs.define(eq=False)
class LineReader:
    """Reads a file descriptor, which stays its caller's. It holds a line and one chunk, at most."""

    _fd: int
    _max_length: int | None = None
    """Bytes of a line; what is longer is passed over."""
    _number: int = attrs.field(init=False, default=0)
    _is_pollable: bool = attrs.field(init=False)
    # What was read and not given out begins at `_position`, which is `_start` in the file; in its first
    # `_searched` bytes there is no end of line.
    _buffer: bytearray = attrs.field(init=False, factory=bytearray)
    _position: int = attrs.field(init=False, default=0)
    _searched: int = attrs.field(init=False, default=0)
    _start: int = attrs.field(init=False, default=0)

    @_is_pollable.default
    def _ask_kind(self) -> bool:
        return not is_regular(self._fd)

    async def read(self) -> Line | None:
        """The next line; None at the end. A checkpoint if it has to read.

        Cancellation: nothing is lost; a read of a regular file under way ends first.

        Raises OSError.
        """
        passed_over = 0
        while (end := self._buffer.find(b"\n", self._position + self._searched)) < 0:
            self._searched = len(self._buffer) - self._position
            if self._max_length is not None and self._searched > self._max_length:
                passed_over += self._drop()
            chunk = await self._read_chunk()
            if not chunk:
                return self._take(len(self._buffer), passed_over, is_ended=False)
            del self._buffer[: self._position]
            self._position = 0
            self._buffer += chunk
        return self._take(end, passed_over, is_ended=True)

    def _drop(self) -> int:
        """Forget what there is of a line that is too long; returns how much that is."""
        dropped = self._searched
        self._buffer.clear()
        self._position = self._searched = 0
        return dropped

    def _take(self, end: int, passed_over: int, *, is_ended: bool) -> Line | None:
        length = end - self._position + passed_over
        if not length and not is_ended:
            return None
        content: bytes | None = bytes(memoryview(self._buffer)[self._position : end])
        if self._max_length is not None and length > self._max_length:
            content = None
        self._number += 1
        line = Line(self._number, self._start, content, is_ended)
        self._start += length + is_ended
        self._position = min(end + 1, len(self._buffer))
        self._searched = 0
        return line

    async def _read_chunk(self) -> bytes:
        if self._is_pollable:
            await trio.lowlevel.wait_readable(self._fd)
            return os.read(self._fd, _CHUNK)
        return await trio.to_thread.run_sync(partial(os.read, self._fd, _CHUNK))
