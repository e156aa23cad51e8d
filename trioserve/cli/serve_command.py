"""`trioserve serve`, up to the point where its flags are understood."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.args import EngineArgs
from trioserve.cli.environment import api_key_from_environment
from trioserve.cli.flags import FlagParser
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["parse", "run"]


def run(arguments: Sequence[str]) -> int:
    """The command; returns its exit code. Raises TrioserveError."""
    engine_args, server_args = parse(arguments)
    # A wrong flag is told before this takes its time.
    from trioserve.cli.serve import serve  # noqa: PLC0415

    return serve(engine_args, server_args)


def parse(arguments: Sequence[str]) -> tuple[EngineArgs, ServerArgs]:
    """What the flags say; exits with code 2 if they are wrong."""
    parser = FlagParser("trioserve serve", "Serve a model over HTTP, with the OpenAI API.")
    parser.add_schema(EngineArgs, "engine")
    parser.add_schema(ServerArgs, "server")
    parser.add_retired()
    options = parser.parse(arguments)
    server_values = parser.given(ServerArgs, options)
    if "api_key" not in server_values and (key := api_key_from_environment()) is not None:
        server_values["api_key"] = key
    engine_args = parser.build(EngineArgs, parser.given(EngineArgs, options))
    return engine_args, parser.build(ServerArgs, server_values)
