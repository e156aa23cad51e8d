"""Prompts with a gap: what comes before it, what comes after it, and the model fills it in.

Models that were taught this have tokens for it. Sources: "Efficient Training of Language Models to Fill in
the Middle" (https://arxiv.org/abs/2207.14255), and the tokenizers of the models themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FillInFormat"]


@attrs.frozen
class FillInFormat:
    """How a family of models is told of a gap."""

    before: str
    """Stands before what comes before the gap."""
    after: str
    """Before what comes after it."""
    gap: str
    """At the end, before what fills it."""
    ends: tuple[str, ...] = ()
    """Tokens that end the filling, beside these three and the model's own end."""

    @classmethod
    def of(cls, added_tokens: Mapping[str, int]) -> FillInFormat | None:
        """That of a model with these tokens; None if it knows none."""
        for known in _FORMATS:
            if {known.before, known.after, known.gap} <= added_tokens.keys():
                return known
        return None

    def prompt(self, before: str, after: str) -> str:
        return f"{self.before}{before}{self.after}{after}{self.gap}"

    def stop_token_ids(self, added_tokens: Mapping[str, int]) -> list[int]:
        """A model that has filled the gap may go on to another file, or to another gap."""
        marks = (self.before, self.after, self.gap, *self.ends)
        return [added_tokens[mark] for mark in marks if mark in added_tokens]


_FORMATS = (
    # Qwen2.5-Coder, CodeGemma
    FillInFormat(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|endoftext|>"),
    ),
    # StarCoder, Granite Code; SantaCoder
    FillInFormat(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<|endoftext|>")
    ),
    FillInFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),
    # Code Llama
    FillInFormat("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),
    # DeepSeek Coder, whose bars and spaces are U+FF5C and U+2581
    FillInFormat(
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
        ("<|EOT|>",),
    ),
)
