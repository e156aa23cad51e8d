"""`trioserve complete`: continue a text in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from trioserve.cli.terminal import converse, show
from trioserve.cli.text_source import make_parser, open_text_source
from trioserve.quantities import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """The command; returns its exit code. Raises TrioserveError, KeyboardInterrupt."""
    parser = make_parser(
        "trioserve complete", "Let a model continue a text: of -q, of stdin as a whole, or line by line."
    )
    parser.add_argument("--max-tokens", metavar="N", type=_max_tokens, help="length of the continuation")
    options = parser.parse(arguments)
    text = options.quick
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read().removesuffix("\n")
    with open_text_source(parser, options) as source:

        def complete(prompt: str) -> bool:
            show(source.complete(prompt, options.max_tokens), [])
            return True

        if text is not None:
            complete(text)
        else:
            converse(parser.prog, "Ctrl-C stops a continuation, Ctrl-D ends.", complete)
    return 0


def _max_tokens(text: str) -> int:
    try:
        number = parse_quantity(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number
