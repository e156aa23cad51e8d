"""The events of a response's stream, as in OpenAI's description (ResponseStreamEvent).

Each class is an event; its `type` is also the name under which it is sent.
"""

from __future__ import annotations

import attrs

from trioserve.server.protocol.chat import ChatTokenLogprob
from trioserve.server.protocol.responses import ResponseObject
from trioserve.server.protocol.responses_items import OutputItem, OutputPart

__all__ = [
    "ArgumentsDelta",
    "ArgumentsDone",
    "ErrorEvent",
    "ItemAdded",
    "ItemDone",
    "PartAdded",
    "PartDone",
    "ReasoningDelta",
    "ReasoningDone",
    "ResponseCompleted",
    "ResponseCreated",
    "ResponseEvent",
    "ResponseFailed",
    "ResponseInProgress",
    "ResponseIncomplete",
    "ResponseQueued",
    "TextDelta",
    "TextDone",
]


# Of the response


@attrs.frozen(kw_only=True)
class ResponseCreated:
    type: str = "response.created"
    sequence_number: int
    response: ResponseObject


@attrs.frozen(kw_only=True)
class ResponseQueued:
    type: str = "response.queued"
    sequence_number: int
    response: ResponseObject


@attrs.frozen(kw_only=True)
class ResponseInProgress:
    type: str = "response.in_progress"
    sequence_number: int
    response: ResponseObject


@attrs.frozen(kw_only=True)
class ResponseCompleted:
    type: str = "response.completed"
    sequence_number: int
    response: ResponseObject


@attrs.frozen(kw_only=True)
class ResponseIncomplete:
    type: str = "response.incomplete"
    sequence_number: int
    response: ResponseObject


@attrs.frozen(kw_only=True)
class ResponseFailed:
    type: str = "response.failed"
    sequence_number: int
    response: ResponseObject


@attrs.frozen(kw_only=True)
class ErrorEvent:
    """What ended the stream, where no response can tell it."""

    type: str = "error"
    sequence_number: int
    code: str | None
    message: str
    param: str | None


# Of an item


@attrs.frozen(kw_only=True)
class ItemAdded:
    type: str = "response.output_item.added"
    sequence_number: int
    output_index: int
    item: OutputItem


@attrs.frozen(kw_only=True)
class ItemDone:
    type: str = "response.output_item.done"
    sequence_number: int
    output_index: int
    item: OutputItem


@attrs.frozen(kw_only=True)
class PartAdded:
    type: str = "response.content_part.added"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputPart


@attrs.frozen(kw_only=True)
class PartDone:
    type: str = "response.content_part.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputPart


@attrs.frozen(kw_only=True)
class TextDelta:
    type: str = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ChatTokenLogprob]


@attrs.frozen(kw_only=True)
class TextDone:
    type: str = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatTokenLogprob]


@attrs.frozen(kw_only=True)
class ReasoningDelta:
    type: str = "response.reasoning_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


@attrs.frozen(kw_only=True)
class ReasoningDone:
    type: str = "response.reasoning_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


@attrs.frozen(kw_only=True)
class ArgumentsDelta:
    type: str = "response.function_call_arguments.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


@attrs.frozen(kw_only=True)
class ArgumentsDone:
    type: str = "response.function_call_arguments.done"
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ErrorEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
