"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from msgspec import UNSET

from trioserve.errors import InvalidRequestError
from trioserve.server.errors import naming, public_finish_reason
from trioserve.server.framing import ChunkFraming
from trioserve.server.generation import Generation, open_outputs
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
from trioserve.server.sampling import make_beam_search_params, make_params
from trioserve.server.service import Service
from trioserve.server.streaming import start_stream
from trioserve.server.tool_calls.answers import call_delta, whole_calls
from trioserve.server.tool_calls.scanner import CallScanner
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from quart import Response

    from trioserve.beam_search_params import BeamSearchParams
    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.sampling_params import SamplingParams
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.chat import ChatCompletionRequest, ChatLogprobs
    from trioserve.server.protocol.usage import Usage

__all__ = ["ChatCompletions"]


@attrs.frozen(eq=False)
class ChatCompletions:
    """The handler. The engine's work ends with the request's scope, whatever ends that."""

    _service: Service
    _trusts_templates: bool = False
    """Requests may bring their own chat template."""

    async def create(self) -> Response:
        request = await self._service.read_request(CHAT_READER)
        limit_request(request.timeout)
        self._service.check_model(request.model)
        head = self._service.reply_head("chatcmpl", request.request_id)
        with naming(request.field_names):
            return await self._answer(request, head)

    async def _answer(self, request: ChatCompletionRequest, head: ReplyHead) -> Response:
        self._service.llm.check_room(request.num_sequences)
        generation = await self._plan(request, head)
        outputs = await open_outputs(self._service.llm, generation, request_stack())
        tokenizer = self._service.llm.tokenizer
        if request.stream:
            writer = ChatChunks(request, head, tokenizer)
            return await start_stream(outputs, writer, num_prompts=1, field_names=request.field_names)
        _, output = await outputs.next()
        return json_reply(_whole_reply(request, head, output, tokenizer))

    async def _plan(self, request: ChatCompletionRequest, head: ReplyHead) -> Generation:
        params = self._params(request)
        prompt = await self._service.llm.render_chat(
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            tools=None if request.tools is None else [tool.for_template() for tool in request.tools],
            template_kwargs=request.template_kwargs,
            chat_template=self._foreign_template(request),
        )
        return Generation(
            prompts=[prompt],
            request_ids=[head.id],
            params=params,
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
        )

    def _foreign_template(self, request: ChatCompletionRequest) -> str | None:
        if request.chat_template is not None and not self._trusts_templates:
            raise InvalidRequestError(
                "chat_template must be null: this server takes no templates from requests "
                "(--trust-request-chat-template).",
                parameter="chat_template",
            )
        return request.chat_template

    def _params(self, request: ChatCompletionRequest) -> SamplingParams | BeamSearchParams:
        limit = request.token_limit
        if request.use_beam_search:
            assert limit is not None, "the reader has seen to it"
            return make_beam_search_params(request, max_tokens=limit)
        defaults = self._service.llm.model.generation
        return make_params(request, defaults, max_tokens=limit, logprobs=request.num_top_logprobs)


def _logprobs(
    request: ChatCompletionRequest, completion: CompletionOutput, tokenizer: Tokenizer
) -> ChatLogprobs | None:
    num_top = request.num_top_logprobs
    if num_top is None or completion.logprobs is None:
        return None
    return chat_logprobs(completion.logprobs, num_top, tokenizer)


def _scanner(request: ChatCompletionRequest) -> CallScanner | None:
    """For one choice; None: its text is an answer in words."""
    return CallScanner(request.named_function) if request.must_call else None


def _message(completion: CompletionOutput, scanner: CallScanner | None) -> AssistantMessage:
    if scanner is None:
        return AssistantMessage(completion.text)
    return AssistantMessage(None, tool_calls=whole_calls(scanner, completion.text) or UNSET)


def _finish_reason(completion: CompletionOutput, scanner: CallScanner | None) -> str | None:
    """Calls that a stop string cut off are nothing to execute, and end as any text does.

    A function that the request named is no exception, though OpenAI's API has been seen to say "stop" there:
    its description knows none, clients that read `tool_calls` do not care, and the others look for this word.

    Raises as `public_finish_reason` does.
    """
    reason = public_finish_reason(completion)
    return "tool_calls" if reason == "stop" and scanner is not None and scanner.is_complete else reason


def _whole_reply(
    request: ChatCompletionRequest, head: ReplyHead, output: RequestOutput, tokenizer: Tokenizer
) -> ChatCompletion:
    usage = UsageCounter()
    usage.add_prompt(output)
    choices = []
    for completion in output.outputs:
        usage.completion_tokens += len(completion.token_ids)
        scanner = _scanner(request)
        choices.append(
            ChatChoice(
                index=completion.index,
                message=_message(completion, scanner),
                logprobs=_logprobs(request, completion, tokenizer),
                finish_reason=_finish_reason(completion, scanner) or "stop",
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

    def __init__(self, request: ChatCompletionRequest, head: ReplyHead, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._framing = ChunkFraming("chat.completion.chunk", head, wants_usage=request.wants_usage)
        self._usage = UsageCounter()
        self._wants_continuous_usage = request.wants_continuous_usage
        self._started = False
        self._scanners = [_scanner(request) for _ in range(request.n or 1)]
        """By choice."""
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
        return self._framing.usage_frame(self._usage.usage()) if self._request.wants_usage else b""

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
        scanner = self._scanners[completion.index]
        choices = [ChatChunkChoice(completion.index, delta) for delta in self._deltas(completion, scanner)]
        if not choices:
            return []
        if completion.finish_reason is not None:
            choices[-1].finish_reason = _finish_reason(completion, scanner)
            choices[-1].stop_reason = completion.stop_reason
        if self._shows_tokens:
            choices[0].logprobs = _logprobs(self._request, completion, self._tokenizer)
            if self._request.return_token_ids:
                choices[0].token_ids = completion.token_ids
        return choices

    def _deltas(self, completion: CompletionOutput, scanner: CallScanner | None) -> list[Delta]:
        """One call in each, as many clients look at the first only. At least one if there is more to say."""
        has_ended = completion.finish_reason is not None
        if scanner is not None:
            deltas = [Delta(tool_calls=[call_delta(part)]) for part in scanner.feed(completion.text)]
            if has_ended:
                deltas.append(Delta())
        else:
            deltas = [Delta(completion.text)] if completion.text else []
        return deltas if deltas or not (has_ended or self._shows_tokens) else [Delta()]

    def _running_usage(self) -> Usage | None:
        return self._usage.usage() if self._wants_continuous_usage else None
