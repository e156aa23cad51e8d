"""Where `chat` and `complete` get their text from: a server, or an engine of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trioserve.args import EngineArgs
from trioserve.cli.environment import api_key_from_environment
from trioserve.cli.flags import FlagParser, flag_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Generator, Mapping, Sequence
    from contextlib import AbstractContextManager

__all__ = ["Message", "TextSource", "make_parser", "open_text_source"]

Message = dict[str, str]
"""`role` and `content`."""


class TextSource(Protocol):
    """Closing one of the generators ends the request behind it."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        """The answer to a conversation, piece by piece. Raises TrioserveError."""

    def complete(self, prompt: str, max_tokens: int | None) -> Generator[str, None, None]:
        """What follows `prompt`, piece by piece; None: as many tokens as the server's or the model's
        default says. Raises TrioserveError."""


def make_parser(prog: str, description: str) -> FlagParser:
    """The flags that both commands share."""
    parser = FlagParser(prog, description)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="answer this one text, and end")
    server = parser.add_argument_group("with a server that runs already")
    server.add_argument("--url", metavar="URL", help="its address, such as http://localhost:8000/v1")
    server.add_argument("--model-name", metavar="NAME", help="the model to ask for [the server's first]")
    server.add_argument("--api-key", metavar="KEY", help="sent as bearer token [$TRIOSERVE_API_KEY]")
    parser.add_schema(EngineArgs, "without one: the engine to start")
    parser.add_retired()
    return parser


def open_text_source(parser: FlagParser, options: Namespace) -> AbstractContextManager[TextSource]:
    """By the flags of `make_parser`; exits if they contradict each other.

    Raises:
      TrioserveError: there is no such server or model, or the engine does not start.
    """
    engine_values = parser.given(EngineArgs, options)
    if options.url is None:
        for field in ("model_name", "api_key"):
            if getattr(options, field) is not None:
                parser.error(f"{flag_of(field)}: goes with --url, which is not given")
        from trioserve.cli.local_source import LocalSource  # noqa: PLC0415 - only one of the two is needed

        return LocalSource(parser.build(EngineArgs, engine_values))
    for field in engine_values:
        instead = "use --model-name" if field == "model" else "it would be the server's"
        parser.error(f"{flag_of(field)}: does not go with --url; {instead}")
    if not options.url.startswith(("http://", "https://")):
        parser.error(f"--url: must begin with http:// or https://, got {options.url!r}")
    from trioserve.cli.remote_source import RemoteSource  # noqa: PLC0415

    return RemoteSource(options.url, options.model_name, options.api_key or api_key_from_environment())
