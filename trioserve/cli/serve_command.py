"""`trioserve serve`, up to the point where its flags are understood."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.args import EngineArgs
from trioserve.cli.environment import take_api_keys_from_environment
from trioserve.cli.flags import FlagParser
from trioserve.cli.model_flags import HELP, build_models
from trioserve.server.api_keys import read_key_file
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["parse", "run", "with_bounded_queue"]

_EXIT_CODES = """\
Exit codes: 0 after it was asked to end (SIGTERM or SIGINT) and requests had ended or run out of time; 1 if it
could not start; 2 if a flag was wrong; 3 if the engine core died and was not replaced, whatever came after
that; 130 if a signal cut the start or the drain short.
"""

_QUEUED_PER_RUNNING = 16
"""Sequences that may wait, by default, for each that may run."""


def run(arguments: Sequence[str]) -> int:
    """The command; returns its exit code. Raises TrioserveError."""
    models, server_args = parse(arguments)
    # A wrong flag is told before this takes its time.
    from trioserve.cli.serve import serve  # noqa: PLC0415

    return serve([with_bounded_queue(engine_args) for engine_args in models], server_args)


def parse(arguments: Sequence[str]) -> tuple[list[EngineArgs], ServerArgs]:
    """What the flags say, of each model and of the server; exits with code 2 if they are wrong. The API keys
    are all in `api_key` then.

    Raises:
      InvalidConfigError: the environment's keys or the file of keys are wrong.
    """
    parser = FlagParser("trioserve serve", "Serve a model over HTTP, with the OpenAI API.")
    parser.epilog = _EXIT_CODES
    parser.add_schema(EngineArgs, "engine", repeated={"model": HELP})
    parser.add_schema(ServerArgs, "server")
    parser.add_retired()
    options = parser.parse(arguments)
    models = build_models(parser, parser.given(EngineArgs, options))
    environment = take_api_keys_from_environment()
    server_values = {"api_key": environment, **parser.given(ServerArgs, options)}
    return models, _with_keys_of_file(parser.build(ServerArgs, server_values))


def with_bounded_queue(args: EngineArgs) -> EngineArgs:
    """A server must not queue without end, so where the arguments set no limit, this does."""
    if args.max_num_queued_reqs is not None:
        return args
    return attrs.evolve(args, max_num_queued_reqs=_QUEUED_PER_RUNNING * args.max_num_seqs)


def _with_keys_of_file(args: ServerArgs) -> ServerArgs:
    if args.api_key_file is None:
        return args
    digests = (*args.api_key, *read_key_file(args.api_key_file))
    return attrs.evolve(args, api_key=digests, api_key_file=None)
