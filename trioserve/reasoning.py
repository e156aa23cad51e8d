"""How models think before they answer: between which marks, and whether they begin with it unasked.

Found by name or in the chat template, by the engine's side (a thinking budget) and the server's (what of an
answer is reasoning) alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from trioserve.config import ReasoningConfig

__all__ = ["REASONING_PARSERS", "ReasoningFormat", "find_reasoning_format"]

REASONING_PARSERS = ("auto", "none", "deepseek_r1", "qwen3", "tags")

_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""What published chat templates have."""


@attrs.frozen(kw_only=True)
class ReasoningFormat:
    start: str = "<think>"
    end: str = "</think>"
    begins_unasked: bool = False
    """An answer is reasoning from its beginning, with the start mark or without, unless the prompt ends with
    the end mark. Else only if the start mark is the end of the prompt, or the beginning of the answer."""

    def is_open_after(self, prompt: str) -> bool:
        """What follows this prompt is reasoning, whatever it begins with."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.start) or (self.begins_unasked and not prompt.endswith(self.end))

    def is_closed_after(self, prompt: str) -> bool:
        """What follows this prompt is no reasoning."""
        return prompt.rstrip().endswith(self.end)

    def is_open_within(self, message: str) -> bool:
        """What continues this message is reasoning."""
        return message.rfind(self.start) > message.rfind(self.end)


def find_reasoning_format(
    name: str, marks: ReasoningConfig | None, chat_template: str | None
) -> ReasoningFormat | None:
    """The format of this name (one of REASONING_PARSERS); `marks` replace its own. "tags" has none of its
    own, and takes those of the template, or <think> and </think>; "auto" does so where there are any."""
    template = chat_template or ""
    found = next((known for known in _MARKS if known[1] in template), None)
    if name == "none" or (name == "auto" and not (marks or found)):
        return None
    if name == "deepseek_r1":
        begins_unasked = True
    else:
        # A template that cuts thoughts off at their end, and never writes how they begin.
        begins_unasked = name == "auto" and found is not None and found[0] not in template
    if marks is not None:
        start, end = marks.start, marks.end
    else:
        start, end = (found or _MARKS[0]) if name in {"auto", "tags"} else _MARKS[0]
    return ReasoningFormat(start=start, end=end, begins_unasked=begins_unasked)
