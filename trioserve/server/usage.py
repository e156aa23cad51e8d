"""Counting the tokens of one response."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.server.protocol.usage import CompletionTokensDetails, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from trioserve.outputs import RequestOutput

__all__ = ["UsageCounter"]


@attrs.define
class UsageCounter:
    """Over all prompts and choices; a prompt counts once, whatever n is."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def add_prompt(self, output: RequestOutput) -> None:
        """Once per prompt, with any of its outputs."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens),
        )
