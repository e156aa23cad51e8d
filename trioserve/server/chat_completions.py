"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from msgspec import UNSET

from trioserve.parsers.parts import CallPart, ReasoningPart, TextPart
from trioserve.server.chat_answers import ChatAnswer, prompt_text, reported_logprobs, told_finish_reason
from trioserve.server.errors import naming
from trioserve.server.framing import DONE, ChunkFraming, last_frames
from trioserve.server.protocol.chat import ChatChunkChoice, Delta
from trioserve.server.protocol.readers import CHAT_READER
from trioserve.server.protocol.tools import FunctionDelta
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import limit_request, request_stack
from trioserve.server.streaming import start_stream
from trioserve.server.tool_calls.answers import call_delta
from trioserve.server.turns import Turns
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeGuard

    from quart import Response

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.parsers.parts import Part
    from trioserve.server.errors import Failure
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.chat import ChatCompletionRequest
    from trioserve.server.protocol.usage import Usage
    from trioserve.server.turns import AnswerReader

__all__ = ["ChatCompletions"]


@attrs.frozen(eq=False)
class ChatCompletions:
    """The handler. The engine's work ends with the request's scope, whatever ends that."""

    _turns: Turns

    async def create(self) -> Response:
        service = self._turns.service
        request = service.reply_defaults.complete(await service.read_request(CHAT_READER)).simplified()
        limit_request(request.timeout)
        service.check_model(request.model)
        head = service.reply_head("chatcmpl", request.request_id, request.model)
        if request.service_tier is not None:
            head = attrs.evolve(head, service_tier="default")
        with naming(request.field_names):
            return await self._answer(request, head)

    async def _answer(self, request: ChatCompletionRequest, head: ReplyHead) -> Response:
        turn = await self._turns.open(request, head.id, request_stack())
        tokenizer = self._turns.service.llm.tokenizer
        if request.stream:
            writer = ChatChunks(request, head, tokenizer, turn.readers)
            return await start_stream(turn.outputs, writer, num_prompts=1, field_names=request.field_names)
        _, output = await turn.outputs.next()
        answer = ChatAnswer(head, tokenizer)
        answer.add(request, output, turn.readers)
        return json_reply(answer.reply_with_prompt(request, output))


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
        self._hides_reasoning = request.include_reasoning is False
        self._has_old_calls = bool(request.functions)
        self._text_frames: dict[int, Callable[[str], bytes]] = {}  # by choice

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        frames = []
        if not self._started:
            self._started = True
            self._usage.add_prompt(output)
            frames += self._first_frames(output)
        for completion in output.outputs:
            self._usage.completion_tokens += len(completion.token_ids)
            parts = self._readers[completion.index].read(completion)
            if self._is_text_alone(parts, completion):
                frames += [self._text_frame(completion.index, part.text) for part in parts]
            else:
                usage = self._running_usage()
                frames += [self._framing.frame(choice, usage) for choice in self._choices(completion, parts)]
        return b"".join(frames)

    def end(self) -> bytes:
        return (self._framing.usage_frame(self._total()) if self._request.wants_usage else b"") + DONE

    def fail(self, failure: Failure) -> bytes:
        return last_frames(failure.detail)

    def _first_frames(self, output: RequestOutput) -> list[bytes]:
        content = None if self._request.must_call else ""
        indices = range(self._request.n or 1)
        usage = self._running_usage()
        first, *others = [
            ChatChunkChoice(index, Delta(content=content, role="assistant", refusal=None))
            for index in indices
        ]
        if echoed := self._request.echoed_text:
            others += [ChatChunkChoice(index, Delta(echoed)) for index in indices]
        frames = [self._framing.frame(choice, usage) for choice in (first, *others)]
        if about_prompt := self._about_prompt(output):
            frames[0] = self._framing.frame_with(about_prompt, first, usage)
        return frames

    def _about_prompt(self, output: RequestOutput) -> dict[str, object]:
        told: dict[str, object] = {}
        if self._request.return_token_ids:
            told["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._request.return_prompt_text:
            told["prompt_text"] = prompt_text(output, self._tokenizer)
        return told

    def _is_text_alone(
        self, parts: Sequence[Part], completion: CompletionOutput
    ) -> TypeGuard[Sequence[TextPart]]:
        """Nothing else is to be said of this output, as of nearly all."""
        if completion.finish_reason is not None or self._shows_tokens or self._wants_continuous_usage:
            return False
        for part in parts:  # noqa: SIM110 - asked for each token, a generator would cost more than the rest
            if type(part) is not TextPart:
                return False
        return True

    def _text_frame(self, index: int, text: str) -> bytes:
        if (frame := self._text_frames.get(index)) is None:
            frame = self._framing.text_frames(lambda text: ChatChunkChoice(index, Delta(text)))
            self._text_frames[index] = frame
        return frame(text)

    def _choices(self, completion: CompletionOutput, parts: Sequence[Part]) -> list[ChatChunkChoice]:
        """For a chunk each: what an output says in several goes with the first, or the last of them."""
        reader = self._readers[completion.index]
        if self._hides_reasoning:
            parts = [part for part in parts if not isinstance(part, ReasoningPart)]
        has_ended = completion.finish_reason is not None
        deltas = [self._delta(part) for part in parts]
        if has_ended and (not parts or isinstance(parts[-1], CallPart)):
            deltas.append(Delta())  # clients look for the end of calls beside no call
        elif self._shows_tokens and not parts:
            deltas.append(Delta())
        choices = [ChatChunkChoice(completion.index, delta) for delta in deltas]
        if not choices:
            return []
        if has_ended:
            choices[-1].finish_reason = told_finish_reason(self._request, reader)
            choices[-1].stop_reason = completion.stop_reason
        if self._shows_tokens:
            choices[0].logprobs = reported_logprobs(self._request, completion, self._tokenizer)
            if self._request.return_token_ids:
                choices[0].token_ids = completion.token_ids
        return choices

    def _delta(self, part: Part) -> Delta:
        """One call in each, as many clients look at the first only."""
        match part:
            case TextPart(text):
                return Delta(text)
            case ReasoningPart(text):
                return Delta(reasoning=text, reasoning_content=text)
            case CallPart() if self._has_old_calls:
                name = UNSET if part.name is None else part.name
                return Delta(function_call=FunctionDelta(part.arguments, name))
            case CallPart():
                return Delta(tool_calls=[call_delta(part)])

    def _running_usage(self) -> Usage | None:
        return self._total() if self._wants_continuous_usage else None

    def _total(self) -> Usage:
        self._usage.reasoning_tokens = sum(reader.num_reasoning_tokens for reader in self._readers)
        return self._usage.usage()
