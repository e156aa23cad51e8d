"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from msgspec import UNSET

from trioserve.parsers.parts import CallPart, ReasoningPart, TextPart
from trioserve.server.errors import naming
from trioserve.server.framing import DONE, ChunkFraming, last_frames
from trioserve.server.logprobs import chat_logprobs, prompt_logprobs
from trioserve.server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
)
from trioserve.server.protocol.readers import CHAT_READER
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import limit_request, request_stack
from trioserve.server.streaming import start_stream
from trioserve.server.tool_calls.answers import call_delta, whole_calls
from trioserve.server.turns import Turns
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.parsers.parts import Part
    from trioserve.server.errors import Failure
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.chat import ChatCompletionRequest, ChatLogprobs
    from trioserve.server.protocol.usage import Usage
    from trioserve.server.turns import AnswerReader

__all__ = ["ChatCompletions"]


@attrs.frozen(eq=False)
class ChatCompletions:
    """The handler. The engine's work ends with the request's scope, whatever ends that."""

    _turns: Turns

    async def create(self) -> Response:
        service = self._turns.service
        request = await service.read_request(CHAT_READER)
        limit_request(request.timeout)
        service.check_model(request.model)
        head = service.reply_head("chatcmpl", request.request_id)
        with naming(request.field_names):
            return await self._answer(request, head)

    async def _answer(self, request: ChatCompletionRequest, head: ReplyHead) -> Response:
        turn = await self._turns.open(request, head.id, request_stack())
        tokenizer = self._turns.service.llm.tokenizer
        if request.stream:
            writer = ChatChunks(request, head, tokenizer, turn.readers)
            return await start_stream(turn.outputs, writer, num_prompts=1, field_names=request.field_names)
        _, output = await turn.outputs.next()
        return json_reply(_whole_reply(request, head, output, tokenizer, turn.readers))


def _logprobs(
    request: ChatCompletionRequest, completion: CompletionOutput, tokenizer: Tokenizer
) -> ChatLogprobs | None:
    num_top = request.num_top_logprobs
    if num_top is None or completion.logprobs is None:
        return None
    return chat_logprobs(completion.logprobs, num_top, tokenizer)


def _message(parts: Sequence[Part], *, must_call: bool) -> AssistantMessage:
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    calls = whole_calls(part for part in parts if isinstance(part, CallPart))
    content = None if must_call or (calls and not text) else text
    return AssistantMessage(content, tool_calls=calls or UNSET)


def _whole_reply(
    request: ChatCompletionRequest,
    head: ReplyHead,
    output: RequestOutput,
    tokenizer: Tokenizer,
    readers: Sequence[AnswerReader],
) -> ChatCompletion:
    usage = UsageCounter()
    usage.add_prompt(output)
    choices = []
    for completion in output.outputs:
        usage.completion_tokens += len(completion.token_ids)
        reader = readers[completion.index]
        parts = reader.read(completion)
        choices.append(
            ChatChoice(
                index=completion.index,
                message=_message(parts, must_call=request.must_call),
                logprobs=_logprobs(request, completion, tokenizer),
                finish_reason=reader.finish_reason or "stop",
                stop_reason=completion.stop_reason,
                token_ids=completion.token_ids if request.return_token_ids else UNSET,
            )
        )
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=choices,
        usage=usage.usage(),
        system_fingerprint=head.system_fingerprint,
        prompt_token_ids=output.prompt_token_ids if request.return_token_ids else UNSET,
        prompt_logprobs=UNSET if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
    )


class ChatChunks:
    """The chunks of a stream: first every choice's role, then what comes, at last the usage."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        head: ReplyHead,
        tokenizer: Tokenizer,
        readers: Sequence[AnswerReader],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._readers = readers
        self._framing = ChunkFraming("chat.completion.chunk", head, wants_usage=request.wants_usage)
        self._usage = UsageCounter()
        self._wants_continuous_usage = request.wants_continuous_usage
        self._started = False
        # With either of these a chunk without text has something to say all the same.
        self._shows_tokens = bool(request.logprobs or request.return_token_ids)

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        frames = []
        if not self._started:
            self._started = True
            self._usage.add_prompt(output)
            frames += self._role_frames(output)
        for completion in output.outputs:
            self._usage.completion_tokens += len(completion.token_ids)
            usage = self._running_usage()
            frames += [self._framing.frame(choice, usage) for choice in self._choices(completion)]
        return b"".join(frames)

    def end(self) -> bytes:
        usage = self._framing.usage_frame(self._usage.usage()) if self._request.wants_usage else b""
        return usage + DONE

    def fail(self, failure: Failure) -> bytes:
        return last_frames(failure.detail)

    def _role_frames(self, output: RequestOutput) -> list[bytes]:
        content = None if self._request.must_call else ""
        choices = [
            ChatChunkChoice(index, Delta(content=content, role="assistant", refusal=None))
            for index in range(self._request.n or 1)
        ]
        usage = self._running_usage()
        frames = [self._framing.frame(choice, usage) for choice in choices]
        if self._request.return_token_ids:
            frames[0] = self._framing.prompt_frame(choices[0], list(output.prompt_token_ids), usage)
        return frames

    def _choices(self, completion: CompletionOutput) -> list[ChatChunkChoice]:
        """For a chunk each: what an output says in several goes with the first, or the last of them."""
        reader = self._readers[completion.index]
        parts = reader.read(completion)
        has_ended = completion.finish_reason is not None
        deltas = [_delta(part) for part in parts]
        if (has_ended and (not deltas or self._request.must_call)) or (self._shows_tokens and not deltas):
            deltas.append(Delta())
        choices = [ChatChunkChoice(completion.index, delta) for delta in deltas]
        if not choices:
            return []
        if has_ended:
            choices[-1].finish_reason = reader.finish_reason
            choices[-1].stop_reason = completion.stop_reason
        if self._shows_tokens:
            choices[0].logprobs = _logprobs(self._request, completion, self._tokenizer)
            if self._request.return_token_ids:
                choices[0].token_ids = completion.token_ids
        return choices

    def _running_usage(self) -> Usage | None:
        return self._usage.usage() if self._wants_continuous_usage else None


def _delta(part: Part) -> Delta:
    """One call in each, as many clients look at the first only."""
    match part:
        case TextPart(text):
            return Delta(text)
        case ReasoningPart():
            return Delta()
        case CallPart():
            return Delta(tool_calls=[call_delta(part)])
