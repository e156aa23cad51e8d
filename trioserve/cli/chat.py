"""`trioserve chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.cli.terminal import converse, show
from trioserve.cli.text_source import make_parser, open_text_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.cli.text_source import Message, TextSource

__all__ = ["run"]

_INTRODUCTION = "Ctrl-C stops an answer, /clear forgets the conversation, /exit or Ctrl-D ends."


def run(arguments: Sequence[str]) -> int:
    """The command; returns its exit code. Raises TrioserveError, KeyboardInterrupt."""
    parser = make_parser("trioserve chat", "Talk to a model in the terminal.")
    parser.add_argument("--system-prompt", metavar="TEXT", help="stands before the conversation")
    options = parser.parse(arguments)
    with open_text_source(parser, options) as source:
        conversation = _Conversation(source, options.system_prompt)
        if options.quick is not None:
            conversation.say(options.quick)
        else:
            converse(parser.prog, _INTRODUCTION, conversation.obey)
    return 0


class _Conversation:
    def __init__(self, source: TextSource, system_prompt: str | None) -> None:
        self._source = source
        self._opening: list[Message] = (
            [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        )
        # Invariant between two calls: after the opening, users' messages and answers alternate.
        self._messages = list(self._opening)

    def obey(self, line: str) -> bool:
        """Run a command or say the line; False if it asked to end."""
        match line.strip():
            case "/exit":
                return False
            case "/clear":
                self._messages = list(self._opening)
            case _:
                self.say(line)
        return True

    def say(self, text: str) -> None:
        """Show the answer and remember both. An answer that was stopped is remembered as far as it came; a
        message that got none is forgotten."""
        answer: list[str] = []
        self._messages.append({"role": "user", "content": text})
        try:
            show(self._source.chat(self._messages), answer)
        finally:
            if any(answer):
                self._messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._messages.pop()
