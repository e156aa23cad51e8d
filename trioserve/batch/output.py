"""The output of a batch: whole lines, as they come, after those of earlier runs."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.batch.earlier_results import EarlierResults, read_results
from trioserve.batch.errors import BatchFileError
from trioserve.batch.line_reader import is_regular

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from trioserve.batch.lines import Result

__all__ = ["STANDARD_STREAM", "Output", "open_input", "open_output"]

STANDARD_STREAM = "-"
"""stdin or stdout, in place of a path."""

_PIPE_PIECE = 512
"""Bytes that POSIX lets any pipe take at once, if it is ready to take some."""


@contextmanager
def open_input(name: str) -> Iterator[int]:
    """The descriptor of a file to read; stdin stays open.

    Raises:
      BatchFileError: it cannot be opened.
    """
    if name == STANDARD_STREAM:
        yield sys.stdin.fileno()
        return
    with _file_errors("read", name):
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@asynccontextmanager
async def open_output(name: str, *, retry_errors: bool) -> AsyncIterator[Output]:
    """Open the output, and read what earlier runs have left in it. A torn last line is cut off; with
    `retry_errors`, so are all that are errors (the file is replaced by one without them). Anything but a
    regular file is only written to.

    Raises:
      BatchFileError: it cannot be opened, another run writes to it, or it holds something else.
    """
    if name == STANDARD_STREAM:
        yield Output(sys.stdout.fileno(), "stdout")
        return
    with _file_errors("write", name):
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    output = Output(fd, name)
    try:
        await output.recover(retry_errors=retry_errors)
        yield output
        with _file_errors("write", name):
            output.sync()
    finally:
        output.close()


@attrs.define(eq=False)
class Output:
    """Owns its descriptor, unless it is stdout's. Two runs never write to one file."""

    _fd: int
    _name: str
    earlier: EarlierResults = attrs.field(init=False, factory=EarlierResults)
    _kind: int = attrs.field(init=False)
    # Whose line is being written where that may take time.
    _turn: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    @_kind.default
    def _ask_kind(self) -> int:
        return stat.S_IFMT(os.fstat(self._fd).st_mode)

    async def write(self, result: Result) -> None:
        """Append a line.

        Cancellation: a regular file has the whole line, also if the caller is cancelled already: nothing is
        waited for. What goes into a pipe may be cut.

        Raises:
          BatchFileError: the disk is full, or the like.
          BrokenPipeError: nobody reads the pipe any more.
        """
        line = result.encode()
        with _file_errors("write", self._name):
            if self._may_block():
                async with self._turn:
                    await self._write_pieces(memoryview(line))
            else:
                _write_all(self._fd, line)

    def _may_block(self) -> bool:
        is_terminal = self._kind == stat.S_IFCHR and os.isatty(self._fd)
        return is_terminal or self._kind in {stat.S_IFIFO, stat.S_IFSOCK}

    async def _write_pieces(self, line: memoryview) -> None:
        while line:
            await trio.lowlevel.wait_writable(self._fd)
            line = line[os.write(self._fd, line[:_PIPE_PIECE]) :]

    async def recover(self, *, retry_errors: bool) -> None:
        """See `open_output`."""
        if not is_regular(self._fd):
            return
        _lock(self._fd, self._name)
        if retry_errors:
            await self._drop_errors()
            return
        with _file_errors("read", self._name):
            self.earlier = await read_results(self._fd, self._name, None)
        with _file_errors("write", self._name):
            os.ftruncate(self._fd, self.earlier.end)
            if not self.earlier.is_ended:
                _write_all(self._fd, b"\n")

    async def _drop_errors(self) -> None:
        """The new file takes the place of the old one in one step: a run that ends before leaves the old."""
        new_name = f"{self._name}.{os.getpid()}.tmp"
        mode = stat.S_IMODE(os.fstat(self._fd).st_mode)
        with _file_errors("write", new_name):
            new = os.open(new_name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, mode)
        try:
            _lock(new, new_name)
            with _file_errors("write", new_name):
                self.earlier = await read_results(self._fd, self._name, partial(_write_all, new))
                os.fsync(new)
                os.replace(new_name, self._name)
        except BaseException:
            os.close(new)
            with suppress(FileNotFoundError):
                os.unlink(new_name)
            raise
        os.close(self._fd)
        self._fd = new

    def sync(self) -> None:
        """Have a regular file on the disk."""
        if is_regular(self._fd):
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _lock(fd: int, name: str) -> None:
    """Until `fd` is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchFileError(f"{name} is being written by another run.") from None
    except OSError as error:
        if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP}:  # a file system without locks
            raise


@contextmanager
def _file_errors(verb: str, name: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BatchFileError(f"cannot {verb} {name}: {error.strerror or error}.") from error
