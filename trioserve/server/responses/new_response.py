"""A response at its beginning: what it repeats of its request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from msgspec import UNSET

from trioserve.server.protocol.responses import ReasoningEcho, ResponseObject, TextEcho
from trioserve.server.protocol.responses_request import ResponsesToolChoice

if TYPE_CHECKING:
    from trioserve.sampling_params import SamplingParams
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.responses_request import ResponsesRequest, TextFormat

__all__ = ["new_response"]


def new_response(
    request: ResponsesRequest, response_id: str, head: ReplyHead, params: SamplingParams, *, is_stored: bool
) -> ResponseObject:
    """It has no output yet. What the request left open is as `params` have it, by which it is generated."""
    reasoning, text = request.reasoning, request.text
    return ResponseObject(
        id=response_id,
        created_at=head.created,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=head.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningEcho(
            effort=None if reasoning is None else reasoning.effort,
            summary=None if reasoning is None else reasoning.summary,
        ),
        safety_identifier=request.safety_identifier,
        store=is_stored,
        temperature=params.temperature,
        text=TextEcho(_format(request.format), None if text is None else text.verbosity),
        tool_choice=_tool_choice(request),
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        truncation=request.truncation or "disabled",
        user=UNSET if request.user is None else request.user,
        metadata=request.metadata or {},
    )


def _tool_choice(request: ResponsesRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    if isinstance(choice, ResponsesToolChoice):
        return attrs.asdict(choice, filter=lambda _, value: value is not None)
    return choice or "auto"


def _format(given: TextFormat | None) -> dict[str, Any]:
    if given is None or given.type != "json_schema":
        return {"type": "text" if given is None else given.type}
    named = {"type": given.type, "name": given.name, "schema": given.schema, "strict": given.strict}
    return named if given.description is None else named | {"description": given.description}
