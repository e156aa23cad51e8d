"""The exit codes of the `trioserve` command."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """What a service manager or a shell is told. A subcommand uses those that can happen to it."""

    DONE = 0
    """Of `serve`: it was asked to end, and what ran has ended or run out of time."""
    FAILED = 1
    """An error of `trioserve.errors`, told in one line: of `serve`, it could not start."""
    WRONG_FLAG = 2
    ENGINE_DEAD = 3
    """The engine core died, and was not or could not be restarted. Whatever else happens to a server: after
    this its exit code is this."""
    LINES_FAILED = 4
    """Of `run-batch`: it went through, and lines of the output are errors."""
    INTERRUPTED = 130
    """Ctrl-C; of `serve`, a signal during the start, or a second one during the drain."""
