"""`trioserve serve` in a child process, for as long as a scope lasts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Served", "serve"]

_READY = re.compile(r"serving (\S+) on http://127\.0\.0\.1:(\d+)")
_PATIENCE = 120.0
"""Seconds."""


@attrs.frozen
class Served:
    process: subprocess.Popen[bytes]
    model: str
    port: int
    seconds: float
    """From its start until it was ready."""
    _log: TextIO

    @property
    def log(self) -> str:
        return _read(self._log)


def _read(log: TextIO) -> str:
    return os.pread(log.fileno(), 100_000_000, 0).decode(errors="replace")


@contextmanager
def serve(flags: Sequence[str], program: Sequence[str] = ("-m", "trioserve")) -> Iterator[Served]:
    """A server on a free port, that is ready; it is killed on leaving. `program` is what Python runs."""
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        command = [sys.executable, *program, "serve", "--port", "0", *flags]
        with subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                while (ready := _READY.search(_read(log))) is None:
                    if process.poll() is not None or time.perf_counter() > started + _PATIENCE:
                        raise SystemExit(f"the server did not start:\n{_read(log)}")
                    time.sleep(0.005)
                yield Served(process, ready[1], int(ready[2]), time.perf_counter() - started, log)
            finally:
                process.kill()
