"""POST /inference/v1/generate: for clients that do what lies around tokens themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec
from quart import g

from trioserve.server.errors import naming, public_finish_reason
from trioserve.server.framing import DONE, last_frames
from trioserve.server.generation import Generation, open_outputs
from trioserve.server.logprobs import chat_logprobs, prompt_logprobs
from trioserve.server.protocol.generate import (
    GENERATE_READER,
    Generated,
    GeneratedChoice,
    GeneratedChunk,
)
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import limit_request, request_stack
from trioserve.server.service import Service
from trioserve.server.streaming import start_stream
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from quart import Response

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.server.errors import Failure
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.chat import ChatLogprobs
    from trioserve.server.protocol.generate import GenerateRequest
    from trioserve.server.protocol.usage import Usage

__all__ = ["TokenGenerate"]

_encode = msgspec.json.Encoder().encode


@attrs.frozen(eq=False)
class TokenGenerate:
    """The handler. No text is made, unless stop strings have to be looked for."""

    _service: Service

    async def create(self) -> Response:
        request = await self._service.read_request(GENERATE_READER)
        limit_request(request.timeout)
        self._service.check_model(request.model)
        head = self._service.reply_head("generate", request.request_id, request.model)
        with naming(request.field_names):
            return await self._answer(request, head)

    async def _answer(self, request: GenerateRequest, head: ReplyHead) -> Response:
        params = request.sampling_params.params(stream=bool(request.stream))
        self._service.llm.check_room(params.n)
        generation = Generation(
            prompts=[request.token_ids],
            request_ids=[head.id],
            params=params,
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
            lora=self._service.check_model(request.model),
        )
        outputs = await open_outputs(self._service.llm, generation, request_stack())
        writer = _Writer(request, head, g.request_id, self._service.llm.tokenizer)
        if request.stream:
            return await start_stream(outputs, writer, num_prompts=1, field_names=request.field_names)
        _, output = await outputs.next()
        return json_reply(writer.whole(output))


class _Writer:
    """Of the answer in one piece, or of its chunks."""

    def __init__(
        self, request: GenerateRequest, head: ReplyHead, request_id: str, tokenizer: Tokenizer
    ) -> None:
        self._request = request
        self._head = head
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._usage = UsageCounter()
        self._started = False

    def whole(self, output: RequestOutput) -> Generated:
        choices = self._choices(output)
        known = output.prompt_logprobs
        return Generated(
            request_id=self._request_id,
            model=self._head.model,
            created=self._head.created,
            choices=choices,
            usage=self._usage.usage(),
            prompt_logprobs=None if known is None else prompt_logprobs(known),
        )

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        return b"".join(self._frame([choice]) for choice in self._choices(output))

    def end(self) -> bytes:
        usage = self._frame([], self._usage.usage()) if self._request.wants_usage else b""
        return usage + DONE

    def fail(self, failure: Failure) -> bytes:
        return last_frames(failure.detail)

    def _choices(self, output: RequestOutput) -> list[GeneratedChoice]:
        if not self._started:
            self._started = True
            self._usage.add_prompt(output)
        self._usage.completion_tokens += sum(len(each.token_ids) for each in output.outputs)
        return [
            GeneratedChoice(
                index=completion.index,
                token_ids=completion.token_ids,
                logprobs=self._logprobs(completion),
                finish_reason=public_finish_reason(completion),
                stop_reason=completion.stop_reason,
            )
            for completion in output.outputs
        ]

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        params = self._request.sampling_params
        if completion.logprobs is None:
            return None
        return chat_logprobs(
            completion.logprobs, params.logprobs or 0, self._tokenizer, also=params.logprob_token_ids or ()
        )

    def _frame(self, choices: list[GeneratedChoice], usage: Usage | None = None) -> bytes:
        chunk = GeneratedChunk(
            request_id=self._request_id,
            model=self._head.model,
            created=self._head.created,
            choices=choices,
            usage=usage,
        )
        return b"data: " + _encode(chunk) + b"\n\n"
