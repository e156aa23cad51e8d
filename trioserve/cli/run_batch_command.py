"""`trioserve run-batch`, up to the point where its flags are understood."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import attrs

from trioserve.args import EngineArgs
from trioserve.cli.flags import FlagParser
from trioserve.quantities import parse_quantity
from trioserve.server_args import RESPONSES_NOWHERE, ServerArgs

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

__all__ = ["parse", "run"]

_DESCRIPTION = "Answer a file of requests, as OpenAI's batch API has them, and write a file of answers."

_EXIT_CODES = """\
Exit codes: 0 if every line of the input has a good answer; 1 if it could not start, or a file could not be
read or written; 2 if a flag was wrong; 3 if the engine core died and was not replaced; 4 if lines of the
output are errors; 130 if Ctrl-C or SIGTERM ended it. After any of them, the same command goes on from there.
"""

_API_FIELDS = (
    "trust_request_chat_template",
    "default_chat_template_kwargs",
    "tool_call_parser",
    "exclude_tools_when_tool_choice_none",
    "max_body_size",
    "max_json_depth",
    "request_timeout",
)
"""Of `ServerArgs`: what is about requests, and not about clients."""

_LINES_PER_SEQUENCE = 2
"""Lines under way, by default, for each sequence that may run: the next one is there when one ends."""


def run(arguments: Sequence[str]) -> int:
    """The command; returns its exit code. Raises TrioserveError, KeyboardInterrupt, BrokenPipeError."""
    options, engine_args, server_args = parse(arguments)
    # A wrong flag is told before this takes its time.
    from trioserve.cli.run_batch import BatchJob  # noqa: PLC0415

    return BatchJob(
        engine_args=engine_args,
        server_args=server_args,
        input_name=options.input_file,
        output_name=options.output_file,
        concurrency=options.concurrency or _LINES_PER_SEQUENCE * engine_args.max_num_seqs,
        retry_errors=options.retry_errors,
        shows_progress=options.progress_bar,
    ).run()


def parse(arguments: Sequence[str]) -> tuple[Namespace, EngineArgs, ServerArgs]:
    """What the flags say; exits with code 2 if they are wrong."""
    parser = FlagParser("trioserve run-batch", _DESCRIPTION)
    parser.epilog = _EXIT_CODES
    _add_flags(parser)
    parser.add_schema(EngineArgs, "engine")
    parser.add_schema(ServerArgs, "requests", only=_API_FIELDS)
    parser.add_retired()
    options = parser.parse(arguments)
    engine_values = parser.given(EngineArgs, options)
    engine_args = parser.build(EngineArgs, engine_values)
    if "log" not in engine_values:  # the bar says it all
        engine_args = attrs.evolve(
            engine_args, log=attrs.evolve(engine_args.log, level="warning", stats_interval=0.0)
        )
    server_values = parser.given(ServerArgs, options)
    server_args = parser.build(ServerArgs, {**server_values, "responses_store": RESPONSES_NOWHERE})
    return options, engine_args, server_args


def _add_flags(parser: FlagParser) -> None:
    parser.add_argument(
        "-i",
        "--input-file",
        metavar="FILE",
        required=True,
        type=_local_file,
        help="requests, one on each line; -: stdin",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        required=True,
        type=_local_file,
        help="answers, appended as they come; lines that it answers already are skipped; -: stdout",
    )
    parser.add_argument(
        "--concurrency", metavar="N", type=_concurrency, help="lines under way at a time [2 x --max-num-seqs]"
    )
    parser.add_argument(
        "--retry-errors", action="store_true", help="ask again for the lines that the output has errors of"
    )
    parser.add_argument(
        "--progress-bar", action=argparse.BooleanOptionalAction, default=True, help="on stderr [on]"
    )


def _local_file(name: str) -> str:
    if not name or name.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must be a local file or -, got {name!r}")
    return name


def _concurrency(text: str) -> int:
    try:
        number = parse_quantity(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number
