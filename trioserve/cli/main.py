"""The `trioserve` command: finds the subcommand, and turns errors into exit codes.

What a subcommand needs is imported when it is chosen, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import TYPE_CHECKING

from trioserve.cli.exit_codes import ExitCode
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
  run-batch  answer a file of requests, and write a file of answers
  doctor     tell whether a model can be served here, and show a step of the engine

`trioserve COMMAND --help` lists the flags of a command, `trioserve --version` tells the version.
"""

_COMMANDS = {
    "serve": "trioserve.cli.serve_command",
    "chat": "trioserve.cli.chat",
    "complete": "trioserve.cli.complete",
    "run-batch": "trioserve.cli.run_batch_command",
    "doctor": "trioserve.cli.doctor",
}
"""Modules with a `run(arguments) -> int`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (by default that of this process) and return the exit code: see `ExitCode`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # what reads our output has gone, as in `trioserve ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except (TrioserveError, BaseExceptionGroup) as error:
        return _report(error)


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(_HELP, end="")
            return ExitCode.DONE if arguments else ExitCode.WRONG_FLAG
        case ["-v" | "-V" | "--version", *_]:
            print(__version__)
            return ExitCode.DONE
        case [name, *rest] if name in _COMMANDS:
            exit_code: int = importlib.import_module(_COMMANDS[name]).run(rest)
            return exit_code
    name = arguments[0]
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(_COMMANDS)}"
    print(f"trioserve: {name!r}: unknown command; {hint}", file=sys.stderr)
    return ExitCode.WRONG_FLAG


def _report(error: BaseException) -> int:
    """A line for each of our own errors; a group that has others too goes on, with its traceback."""
    leaves = list(_leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return ExitCode.INTERRUPTED
    if not all(isinstance(leaf, TrioserveError) for leaf in leaves):
        raise error
    for leaf in leaves:
        print(f"trioserve: {one_line(leaf)}", file=sys.stderr)
    return ExitCode.FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for nested in error.exceptions:
            yield from _leaves(nested)
    else:
        yield error
