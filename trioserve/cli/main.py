"""The `trioserve` command: finds the subcommand, and turns errors into exit codes.

Exit codes: 0 done; 1 an error of `trioserve.errors`, told in one line; 2 a wrong command line; 130 Ctrl-C.
A subcommand may have others of its own. What a subcommand needs is imported when it is chosen, so that
`--help` and `--version` answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import TYPE_CHECKING

from trioserve.cli.messages import one_line
from trioserve.errors import TrioserveError
from trioserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["main"]

_HELP = """\
usage: trioserve COMMAND [flags]

A server for language models.

commands:
  serve      serve a model over HTTP, with the OpenAI API
  chat       talk to a model in the terminal
  complete   let a model continue a text
  doctor     tell whether a model can be served here, and show a step of the engine

`trioserve COMMAND --help` lists the flags of a command, `trioserve --version` tells the version.
"""

_COMMANDS = {
    "serve": "trioserve.cli.serve_command",
    "chat": "trioserve.cli.chat",
    "complete": "trioserve.cli.complete",
    "doctor": "trioserve.cli.doctor",
}
"""Modules with a `run(arguments) -> int`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (by default that of this process) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # what reads our output has gone, as in `trioserve ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TrioserveError, BaseExceptionGroup) as error:
        return _report(error)


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(_HELP, end="")
            return 0 if arguments else 2
        case ["-v" | "-V" | "--version", *_]:
            print(__version__)
            return 0
        case [name, *rest] if name in _COMMANDS:
            exit_code: int = importlib.import_module(_COMMANDS[name]).run(rest)
            return exit_code
    name = arguments[0]
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(_COMMANDS)}"
    print(f"trioserve: {name!r}: unknown command; {hint}", file=sys.stderr)
    return 2


def _report(error: BaseException) -> int:
    """A line for each of our own errors; a group that has others too goes on, with its traceback."""
    leaves = list(_leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return 130
    if not all(isinstance(leaf, TrioserveError) for leaf in leaves):
        raise error
    for leaf in leaves:
        print(f"trioserve: {one_line(leaf)}", file=sys.stderr)
    return 1


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for nested in error.exceptions:
            yield from _leaves(nested)
    else:
        yield error
