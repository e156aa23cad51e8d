"""Token counts of a request."""

from __future__ import annotations

import attrs

__all__ = ["CompletionTokensDetails", "PromptTokensDetails", "Usage"]


@attrs.frozen
class PromptTokensDetails:
    cached_tokens: int
    """Found in the prefix cache."""
    audio_tokens: int = 0


@attrs.frozen
class CompletionTokensDetails:
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@attrs.frozen
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = attrs.field(factory=CompletionTokensDetails)
