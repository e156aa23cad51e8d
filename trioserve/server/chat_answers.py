"""Chat completions in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from msgspec import UNSET

from trioserve.frontend.tokenizer import Tokenizer
from trioserve.parsers.parts import CallPart, ReasoningPart, TextPart
from trioserve.server.framing import ReplyHead
from trioserve.server.logprobs import chat_logprobs, prompt_logprobs
from trioserve.server.protocol.chat import AssistantMessage, ChatChoice, ChatCompletion
from trioserve.server.tool_calls.answers import whole_calls
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.parsers.parts import Part
    from trioserve.server.protocol.chat import ChatCompletionRequest, ChatLogprobs
    from trioserve.server.protocol.chat_fields import ChatFields
    from trioserve.server.turns import AnswerReader

__all__ = ["ChatAnswer", "prompt_text", "reported_logprobs", "told_finish_reason"]


@attrs.define(eq=False)
class ChatAnswer:
    """Puts a reply together, output by output."""

    _head: ReplyHead
    _tokenizer: Tokenizer
    _choices: list[ChatChoice] = attrs.field(init=False, factory=list)
    _usage: UsageCounter = attrs.field(init=False, factory=UsageCounter)

    def add(
        self, request: ChatCompletionRequest, output: RequestOutput, readers: Sequence[AnswerReader]
    ) -> None:
        """The choices of an output come after those that are there.

        Raises:
          EngineGenerateError, ApiError: a completion did not end by itself.
        """
        self._usage.add_prompt(output)
        for completion in output.outputs:
            reader = readers[completion.index]
            self._choices.append(self._choice(request, completion, reader))
            self._usage.completion_tokens += len(completion.token_ids)
            self._usage.reasoning_tokens += reader.num_reasoning_tokens

    def _choice(
        self, request: ChatCompletionRequest, completion: CompletionOutput, reader: AnswerReader
    ) -> ChatChoice:
        parts = reader.read(completion)
        return ChatChoice(
            index=len(self._choices),
            message=_message(request, parts),
            logprobs=reported_logprobs(request, completion, self._tokenizer),
            finish_reason=told_finish_reason(request, reader) or "stop",
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if request.return_token_ids else UNSET,
        )

    def reply(self, fields: ChatFields) -> ChatCompletion:
        """Without anything about prompts."""
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=self._choices,
            usage=self._usage.usage(),
            service_tier=self._head.service_tier,
            system_fingerprint=self._head.system_fingerprint,
            metadata=UNSET if fields.metadata is None else fields.metadata,
        )

    def reply_with_prompt(self, request: ChatCompletionRequest, output: RequestOutput) -> ChatCompletion:
        reply = self.reply(request)
        if request.return_token_ids:
            reply.prompt_token_ids = output.prompt_token_ids
        if request.return_prompt_text:
            reply.prompt_text = prompt_text(output, self._tokenizer)
        if output.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return reply


def prompt_text(output: RequestOutput, tokenizer: Tokenizer) -> str:
    if output.prompt is not None:
        return output.prompt
    return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def reported_logprobs(
    request: ChatFields, completion: CompletionOutput, tokenizer: Tokenizer
) -> ChatLogprobs | None:
    num_top = request.num_top_logprobs
    if num_top is None or completion.logprobs is None:
        return None
    return chat_logprobs(
        completion.logprobs,
        num_top,
        tokenizer,
        also=request.logprob_token_ids or (),
        by_id=bool(request.return_tokens_as_token_ids),
    )


def told_finish_reason(request: ChatFields, reader: AnswerReader) -> str | None:
    reason = reader.finish_reason
    return "function_call" if reason == "tool_calls" and request.functions else reason


def _message(request: ChatCompletionRequest, parts: Sequence[Part]) -> AssistantMessage:
    text = request.echoed_text + "".join(part.text for part in parts if isinstance(part, TextPart))
    calls = whole_calls(part for part in parts if isinstance(part, CallPart))
    message = AssistantMessage(None if request.must_call or (calls and not text) else text)
    if calls and request.functions:
        message.function_call = calls[0].function
    elif calls:
        message.tool_calls = calls
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    if reasoning and request.include_reasoning is not False:
        message.reasoning = message.reasoning_content = reasoning
    return message
