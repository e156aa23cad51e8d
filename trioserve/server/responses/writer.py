"""Writes a response while it comes: the object itself, and the events that tell it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trioserve.parsers.parts import CallPart, ReasoningPart, TextPart
from trioserve.server.logprobs import chat_logprobs
from trioserve.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseUsage,
)
from trioserve.server.protocol.responses_events import (
    ErrorEvent,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from trioserve.server.responses.frames import event_frame
from trioserve.server.responses.ids import new_call_id, output_item_id
from trioserve.server.responses.output import OpenCall, OpenMessage, OpenReasoning
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.parsers.parts import Part
    from trioserve.server.errors import Failure
    from trioserve.server.protocol.chat import ChatTokenLogprob
    from trioserve.server.protocol.responses import ResponseObject
    from trioserve.server.responses.output import OpenItem
    from trioserve.server.turns import AnswerReader

__all__ = ["ResponseWriter"]

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""OpenAI knows few codes of failed responses: status -> code, for all others "server_error"."""


class ResponseWriter:
    """Takes the outputs of a turn, changes the response, and gives the frames of its events.

    It is a `ChunkWriter`. Nothing here waits. The frames of one call are in the order of their sequence
    numbers, and each is one event.
    """

    def __init__(
        self,
        response: ResponseObject,
        reader: AnswerReader,
        tokenizer: Tokenizer,
        num_top_logprobs: int | None,
    ) -> None:
        """`response` is queued or in progress, and nobody else changes it. Logprobs None: there are none."""
        self._response = response
        self._reader = reader
        self._tokenizer = tokenizer
        self._num_top_logprobs = num_top_logprobs
        self._usage = UsageCounter()
        self._item: OpenItem | None = None
        # Of tokens that came without any text: they go with the next one.
        self._logprobs: list[ChatTokenLogprob] = []
        self._frames: list[bytes] = []
        self._num_events = 0
        self._has_begun = False

    @property
    def response(self) -> ResponseObject:
        """As far as it has come."""
        if self._item is not None:
            self._item.settle()
        return self._response

    @property
    def has_ended(self) -> bool:
        """Its status is final."""
        return self._response.status not in {"queued", "in_progress"}

    # In pieces

    def announce(self) -> list[bytes]:
        """The first events of a response for which nobody waits: it is queued. Else `advance` tells them."""
        self._emit(ResponseCreated, response=self._response)
        self._emit(ResponseQueued, response=self._response)
        return self._take_frames()

    def advance(self, output: RequestOutput) -> list[bytes]:
        """An output of the engine's has come.

        Raises:
          EngineGenerateError, ApiError: the answer did not end by itself.
        """
        if not self._has_begun:
            self._begin(output)
        for completion in output.outputs:
            self._take(completion)
        return self._take_frames()

    def finish(self) -> list[bytes]:
        """The answer has ended by itself, and the last output has been taken."""
        response, reason = self._response, self._reader.finish_reason
        is_whole = reason in {"stop", "tool_calls"}
        if not response.output:
            self._open_message()
        self._close_item(is_whole=is_whole)
        response.usage = self._counted()
        if is_whole:
            response.status, response.completed_at = "completed", int(time.time())
            self._emit(ResponseCompleted, response=response)
        else:
            limit = IncompleteDetails("max_output_tokens") if reason == "length" else IncompleteDetails()
            response.status, response.incomplete_details = "incomplete", limit
            self._emit(ResponseIncomplete, response=response)
        return self._take_frames()

    def break_off(self, failure: Failure) -> list[bytes]:
        """It did not come to its end. Nothing, if it did; what was only just begun may not be told of."""
        if self.has_ended:
            return []
        self._end_as("failed")
        detail = failure.detail
        code = _ERROR_CODES.get(failure.status, "server_error")
        self._response.error = ResponseFailure(code, detail.message)
        if self._num_events:
            self._emit(ResponseFailed, response=self._response)
        else:
            self._emit(ErrorEvent, code=detail.code, message=detail.message, param=detail.param)
        return self._take_frames()

    def cancel(self) -> list[bytes]:
        """Somebody asked to end it. OpenAI's API has no event for that, so it is told as an error."""
        if self.has_ended:
            return []
        self._end_as("cancelled")
        message = "The response was cancelled."
        self._emit(ErrorEvent, code="response_cancelled", message=message, param=None)
        return self._take_frames()

    # As a ChunkWriter

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        return b"".join(self.advance(output))

    def end(self) -> bytes:
        return b"".join(self.finish())

    def fail(self, failure: Failure) -> bytes:
        return b"".join(self.break_off(failure))

    # Inside

    def _begin(self, output: RequestOutput) -> None:
        self._has_begun = True
        self._usage.add_prompt(output)
        self._response.status = "in_progress"
        if not self._num_events:
            self._emit(ResponseCreated, response=self._response)
        self._emit(ResponseInProgress, response=self._response)

    def _take(self, completion: CompletionOutput) -> None:
        self._usage.completion_tokens += len(completion.token_ids)
        parts = self._reader.read(completion)
        if self._num_top_logprobs is not None and completion.logprobs:
            found = chat_logprobs(completion.logprobs, self._num_top_logprobs, self._tokenizer)
            self._logprobs += found.content
        for part in parts:
            self._take_part(part)
        if not any(isinstance(part, TextPart) for part in parts) and parts:
            self._logprobs.clear()  # they were of thoughts, or of calls

    def _take_part(self, part: Part) -> None:
        match part:
            case TextPart(text):
                message = self._item if isinstance(self._item, OpenMessage) else self._open_message()
                message.add(text, self._take_logprobs())
            case ReasoningPart(text):
                reasoning = self._item if isinstance(self._item, OpenReasoning) else self._open_reasoning()
                reasoning.add(text)
            case CallPart():
                self._take_call(part)

    def _take_call(self, part: CallPart) -> None:
        if part.name is not None:
            self._close_item()
            item_id = self._next_id("function_call")
            self._item = OpenCall.begin(item_id, new_call_id(), part.name, self._response.output, self._emit)
        if part.arguments:
            assert isinstance(self._item, OpenCall), "a call begins with its name"
            self._item.add(part.arguments)

    def _open_message(self) -> OpenMessage:
        self._close_item()
        message = OpenMessage.begin(self._next_id("message"), self._response.output, self._emit)
        self._item = message
        return message

    def _open_reasoning(self) -> OpenReasoning:
        self._close_item()
        reasoning = OpenReasoning.begin(self._next_id("reasoning"), self._response.output, self._emit)
        self._item = reasoning
        return reasoning

    def _close_item(self, *, is_whole: bool = True) -> None:
        item, self._item = self._item, None
        if item is None:
            return
        if isinstance(item, OpenMessage) and self._logprobs:
            item.add("", self._take_logprobs())
        item.close("completed" if is_whole else "incomplete")

    def _end_as(self, status: str) -> None:
        """Not by itself: the item that was open stays as it is, and is not told of again."""
        response = self.response
        if self._item is not None:
            response.output[-1].status = "incomplete"
            self._item = None
        response.status = status
        if self._has_begun:
            response.usage = self._counted()

    def _counted(self) -> ResponseUsage:
        usage, reasoning = self._usage, self._reader.num_reasoning_tokens
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )

    def _next_id(self, kind: str) -> str:
        return output_item_id(kind, self._response.id, len(self._response.output))

    def _take_logprobs(self) -> Sequence[ChatTokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _emit(self, kind: Any, **fields: Any) -> None:
        event = kind(sequence_number=self._num_events, **fields)
        self._num_events += 1
        self._frames.append(event_frame(event))

    def _take_frames(self) -> list[bytes]:
        taken, self._frames = self._frames, []
        return taken
