"""Programs that a worker thread runs to their end, or until the task that waits for it is cancelled."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["run_child"]

_POLL = 0.1
"""Seconds until a cancellation is noticed."""


def run_child(
    command: Sequence[str],
    *,
    text: str = "",
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program with `text` on its stdin; what it wrote to a pipe is in the result, "" for the others.

    Blocking. In a thread of `trio.to_thread.run_sync`, cancelling the task that waits for the thread kills
    the program and raises trio.Cancelled. In any case the program has ended when this returns or raises.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=environment, text=True
    ) as process:
        try:
            output, errors = _communicate(process, text)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output or "", errors or "")


def _communicate(process: subprocess.Popen[str], text: str) -> tuple[str | None, str | None]:
    unsent: str | None = text
    while True:
        try:
            return process.communicate(unsent, timeout=_POLL)
        except subprocess.TimeoutExpired:
            unsent = None  # Popen has it, and goes on sending
            _raise_if_cancelled()


def _raise_if_cancelled() -> None:
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return  # a thread that trio knows nothing of: nobody can cancel it
