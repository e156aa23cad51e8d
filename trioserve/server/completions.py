"""POST /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from trioserve.frontend.prompts import TextPrompt
from trioserve.server.errors import public_finish_reason
from trioserve.server.framing import ChunkFraming
from trioserve.server.generation import Generation, open_outputs
from trioserve.server.logprobs import TextOffsets, completion_logprobs
from trioserve.server.protocol.completions import Completion, CompletionChoice
from trioserve.server.protocol.readers import COMPLETION_READER
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import request_stack
from trioserve.server.sampling import make_params
from trioserve.server.service import Service, read_json_body
from trioserve.server.sse import sse_response
from trioserve.server.streaming import EventStream
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from quart import Response

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import CompletionOutput, RequestOutput
    from trioserve.server.framing import ReplyHead
    from trioserve.server.generation import Outputs
    from trioserve.server.protocol.completions import CompletionRequest
    from trioserve.server.protocol.usage import Usage

__all__ = ["Completions"]

_DEFAULT_MAX_TOKENS = 16


@attrs.frozen(eq=False)
class Completions:
    """The handler. Every prompt is a request of the engine's, `<id>-<prompt index>`; their work ends with the
    scope of the HTTP request, whatever ends that."""

    _service: Service
    _max_body_size: int

    async def create(self) -> Response:
        request = COMPLETION_READER.read(await read_json_body(self._max_body_size))
        self._service.check_model(request.model)
        head = self._service.reply_head("cmpl", request.request_id)
        generation = self._plan(request, head)
        outputs = await open_outputs(self._service.llm, generation, request_stack())
        choices = _ChoiceWriter(request, self._service.llm.tokenizer)
        num_prompts = len(generation.prompts)
        if request.stream:
            events = EventStream(outputs, CompletionChunks(request, head, choices), num_prompts=num_prompts)
            await events.start()
            return sse_response(events)
        return json_reply(await _whole_reply(head, outputs, choices, num_prompts))

    def _plan(self, request: CompletionRequest, head: ReplyHead) -> Generation:
        defaults = self._service.llm.model.generation
        params = make_params(
            request,
            defaults,
            max_tokens=request.max_tokens or _DEFAULT_MAX_TOKENS,
            logprobs=request.logprobs,
        )
        adds_special_tokens = request.add_special_tokens is not False
        return Generation(
            prompts=[
                TextPrompt(prompt, adds_special_tokens) if isinstance(prompt, str) else prompt
                for prompt in request.prompts
            ],
            request_ids=[f"{head.id}-{index}" for index in range(len(request.prompts))],
            params=params,
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
        )


class _ChoiceWriter:
    """Makes the choices of a response, in one piece or in many."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._num_samples = request.n or 1
        # By the choice's index: how far its text is, and which choices have had their first piece.
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self._begun: set[int] = set()

    @property
    def shows_tokens(self) -> bool:
        """A piece without text has something to say all the same."""
        return self._request.logprobs is not None or bool(self._request.return_token_ids)

    def write(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        index = prompt_index * self._num_samples + completion.index
        choice = CompletionChoice(
            index=index,
            text=completion.text,
            logprobs=None,
            finish_reason=public_finish_reason(completion),
            stop_reason=completion.stop_reason,
        )
        if self._request.logprobs is not None and completion.logprobs is not None:
            choice.logprobs = completion_logprobs(
                completion.logprobs, self._request.logprobs, self._tokenizer, self._offsets[index]
            )
        if self._request.return_token_ids:
            choice.token_ids = completion.token_ids
        if index not in self._begun:
            self._begun.add(index)
            self._begin(choice, output)
        return choice

    def _begin(self, choice: CompletionChoice, output: RequestOutput) -> None:
        if self._request.return_token_ids:
            choice.prompt_token_ids = list(output.prompt_token_ids)
        if self._request.echo:
            prompt = output.prompt
            if prompt is None:
                prompt = self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
            choice.text = prompt + choice.text


async def _whole_reply(
    head: ReplyHead, outputs: Outputs, writer: _ChoiceWriter, num_prompts: int
) -> Completion:
    usage = UsageCounter()
    choices = []
    for _ in range(num_prompts):
        prompt_index, output = await outputs.next()
        usage.add_prompt(output)
        for completion in output.outputs:
            usage.completion_tokens += len(completion.token_ids)
            choices.append(writer.write(prompt_index, output, completion))
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=sorted(choices, key=lambda choice: choice.index),
        usage=usage.usage(),
        system_fingerprint=head.system_fingerprint,
    )


class CompletionChunks:
    """The chunks of a stream: text from the first one on, at last the usage."""

    def __init__(self, request: CompletionRequest, head: ReplyHead, choices: _ChoiceWriter) -> None:
        self._choices = choices
        self._framing = ChunkFraming("text_completion", head, wants_usage=request.wants_usage)
        self._usage = UsageCounter()
        self._wants_usage = request.wants_usage
        self._wants_continuous_usage = request.wants_continuous_usage
        self._always_writes = choices.shows_tokens
        self._counted_prompts: set[int] = set()

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        if prompt_index not in self._counted_prompts:
            self._counted_prompts.add(prompt_index)
            self._usage.add_prompt(output)
        frames = []
        for completion in output.outputs:
            self._usage.completion_tokens += len(completion.token_ids)
            if completion.text or completion.finish_reason is not None or self._always_writes:
                choice = self._choices.write(prompt_index, output, completion)
                frames.append(self._framing.frame(choice, self._running_usage()))
        return b"".join(frames)

    def end(self) -> bytes:
        return self._framing.usage_frame(self._usage.usage()) if self._wants_usage else b""

    def _running_usage(self) -> Usage | None:
        return self._usage.usage() if self._wants_continuous_usage else None
