"""The response object of the Responses API, and what its other routes answer."""

from __future__ import annotations

from typing import Any

import attrs
from msgspec import UNSET, UnsetType

from trioserve.server.protocol.responses_items import ItemResource, OutputItem
from trioserve.server.protocol.responses_request import ResponsesTool

__all__ = [
    "DeletedResponse",
    "IncompleteDetails",
    "InputItemList",
    "InputTokenCount",
    "InputTokensDetails",
    "OutputTokensDetails",
    "ReasoningEcho",
    "ResponseFailure",
    "ResponseObject",
    "ResponseUsage",
    "TextEcho",
]


@attrs.define
class InputTokensDetails:
    cached_tokens: int
    """Found in the prefix cache."""
    cache_write_tokens: int = 0
    """Not told apart: what is computed is cached."""


@attrs.define
class OutputTokensDetails:
    reasoning_tokens: int


@attrs.define(kw_only=True)
class ResponseUsage:
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@attrs.define
class ResponseFailure:
    code: str
    """"server_error", "rate_limit_exceeded" or "invalid_prompt"."""
    message: str


@attrs.define
class IncompleteDetails:
    reason: str | UnsetType = UNSET
    """"max_output_tokens"; unset if the model said the same again and again."""


@attrs.define
class ReasoningEcho:
    effort: str | None
    summary: str | None


@attrs.define
class TextEcho:
    format: dict[str, Any]
    verbosity: str | None


@attrs.define(kw_only=True)
class ResponseObject:
    """It changes until its status is "completed", "incomplete", "failed" or "cancelled"."""

    id: str
    object: str = "response"
    created_at: int
    """Unix time."""
    completed_at: int | None = None
    """Of one that is completed."""
    status: str
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = attrs.field(factory=list)
    """In the order in which they came; nothing is taken out again."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    usage: ResponseUsage | None = None
    """Once it has ended."""
    user: str | UnsetType = UNSET
    metadata: dict[str, str]


@attrs.define
class DeletedResponse:
    id: str
    object: str = "response"
    deleted: bool = True


@attrs.define(kw_only=True)
class InputItemList:
    object: str = "list"
    data: list[ItemResource]
    first_id: str
    """Empty if there are no items; so is the next one."""
    last_id: str
    has_more: bool


@attrs.define
class InputTokenCount:
    input_tokens: int
    object: str = "response.input_tokens"
