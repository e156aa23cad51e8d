"""What the terminal commands share: reading lines, showing text as it comes."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from trioserve.cli.messages import one_line
from trioserve.errors import ClosedError, EngineDeadError, TrioserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

__all__ = ["converse", "show"]


def show(pieces: Generator[str, None, None], shown: list[str]) -> None:
    """Print each piece as it comes, and append it to `shown`; close `pieces` and end the line in any case."""
    try:
        with closing(pieces):
            for piece in pieces:
                shown.append(piece)
                print(piece, end="", flush=True)
    finally:
        print(flush=True)


def converse(prog: str, introduction: str, answer: Callable[[str], bool]) -> None:
    """`answer` every line of stdin, until Ctrl-D or until it returns False.

    At a terminal, Ctrl-C ends an answer (or empties the line) and errors are told in one line; both go on.
    Elsewhere both end it. A dead engine ends it anywhere.
    """
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415 - gives input() editing; writes to a stdout that is no terminal
        print(introduction)
    for line in _lines(is_interactive):
        try:
            if not answer(line):
                return
        except (EngineDeadError, ClosedError):
            raise
        except (TrioserveError, KeyboardInterrupt) as error:
            if not is_interactive:
                raise
            if isinstance(error, TrioserveError):
                print(f"{prog}: {one_line(error)}", file=sys.stderr)


def _lines(is_interactive: bool) -> Iterator[str]:
    """Lines that are not blank."""
    while True:
        try:
            line = input("> " if is_interactive else "")
        except EOFError:
            if is_interactive:
                print()
            return
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            print()
            continue
        if line.strip():
            yield line
