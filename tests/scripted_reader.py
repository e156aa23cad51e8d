"""An answer's reader that takes the answer for a script of what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.outputs import FinishReason
from trioserve.parsers.parts import CallPart, Part, ReasoningPart, TextPart

if TYPE_CHECKING:
    from trioserve.outputs import CompletionOutput

__all__ = ["ScriptedReader"]


class ScriptedReader:
    """Stands for `AnswerReader`. Lines are `think TEXT`, `say TEXT`, `call NAME` and `with JSON`,
    and every token is a line."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self.finish_reason: str | None = None
        self.num_reasoning_tokens = 0
        self._num_calls = 0

    def read(self, completion: CompletionOutput) -> list[Part]:
        parts = [self._part(*line.split(" ", 1)) for line in completion.text.splitlines()]
        self.num_reasoning_tokens += sum(isinstance(part, ReasoningPart) for part in parts)
        if completion.finish_reason is FinishReason.STOP and self._num_calls:
            self.finish_reason = "tool_calls"
        elif completion.finish_reason is not None:
            self.finish_reason = str(completion.finish_reason)
        return parts

    def _part(self, kind: str, text: str) -> Part:
        match kind:
            case "think":
                return ReasoningPart(text)
            case "say":
                return TextPart(text)
            case "call":
                self._num_calls += 1
                return CallPart(self._num_calls - 1, text, "")
        return CallPart(self._num_calls - 1, None, text)
