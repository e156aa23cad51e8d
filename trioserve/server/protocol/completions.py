"""POST /v1/completions: the request, the response, the chunk."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from msgspec import UNSET, UnsetType

from trioserve.server.protocol.sampling import SamplingFields
from trioserve.server.protocol.usage import Usage

__all__ = ["Completion", "CompletionChoice", "CompletionLogprobs", "CompletionRequest"]


@attrs.frozen(kw_only=True)
class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    """Only as `n` says it already."""
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]  # structured: all texts, or all lists


@attrs.define(kw_only=True)
class CompletionLogprobs:
    """Four columns, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The most likely tokens and the sampled one, so up to one more than were asked for."""
    text_offset: list[int]
    """Where the token starts, in characters from the start of the choice's text."""


@attrs.define(kw_only=True)
class CompletionChoice:
    """Of a response, and of a chunk (where `finish_reason` is null until the end)."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


@attrs.define(kw_only=True)
class Completion:
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str
