"""POST /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import attrs

from trioserve.outputs import FinishReason
from trioserve.server.completion_plan import plan_completions
from trioserve.server.errors import naming, public_finish_reason
from trioserve.server.framing import DONE, ChunkFraming, last_frames
from trioserve.server.generation import open_outputs
from trioserve.server.logprobs import LogprobColumns, TextOffsets, prompt_logprobs
from trioserve.server.protocol.completions import Completion, CompletionChoice
from trioserve.server.protocol.readers import COMPLETION_READER
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import limit_request, request_stack
from trioserve.server.service import Service
from trioserve.server.streaming import start_stream
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quart import Response

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import CompletionOutput, RequestOutput, TokenLogprobs
    from trioserve.server.errors import Failure
    from trioserve.server.framing import ReplyHead
    from trioserve.server.generation import Outputs
    from trioserve.server.protocol.completions import CompletionRequest
    from trioserve.server.protocol.usage import Usage

__all__ = ["Completions"]


@attrs.frozen(eq=False)
class Completions:
    """The handler. The engine's work ends with the scope of the HTTP request, whatever ends that."""

    _service: Service

    async def create(self) -> Response:
        request = self._service.reply_defaults.complete(await self._service.read_request(COMPLETION_READER))
        limit_request(request.timeout)
        self._service.check_model(request.model)
        head = self._service.reply_head("cmpl", request.request_id, request.model)
        with naming(request.field_names):
            return await self._answer(request, head)

    async def _answer(self, request: CompletionRequest, head: ReplyHead) -> Response:
        self._service.llm.check_room(request.num_sequences)
        generation = plan_completions(self._service.llm, request, head.id)
        outputs = await open_outputs(self._service.llm, generation, request_stack())
        choices = _ChoiceWriter(request, self._service.llm.tokenizer)
        num_prompts = len(generation.prompts)
        if request.stream:
            writer = CompletionChunks(request, head, choices)
            return await start_stream(
                outputs, writer, num_prompts=num_prompts, field_names=request.field_names
            )
        return json_reply(await _whole_reply(head, outputs, choices, num_prompts))


class _ChoiceWriter:
    """Makes the choices of a response, in one piece or in many."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._num_samples = request.n or 1
        self._shows_all = not request.chooses and request.max_tokens != 0
        self._columns = LogprobColumns(
            tokenizer=tokenizer,
            num_top=request.logprobs or 0,
            also=request.logprob_token_ids or (),
            by_id=bool(request.return_tokens_as_token_ids),
        )
        # By the choice's index: how far its text is, and which choices have had their first piece.
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self._begun: set[int] = set()
        # By the prompt's index: they come once, and are part of each of its choices' echo.
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}

    @property
    def shows_tokens(self) -> bool:
        """A piece without text has something to say all the same."""
        return self._request.logprobs is not None or bool(self._request.return_token_ids)

    def count_tokens(self, output: RequestOutput) -> int:
        """Of all completions that were drawn, and not only of those that are shown."""
        if self._request.max_tokens == 0:
            return 0
        return sum(len(completion.token_ids) for completion in output.outputs)

    def completions(self, output: RequestOutput) -> list[CompletionOutput]:
        """What is to be written of an output."""
        drawn = output.outputs
        if self._shows_all:
            return drawn
        shown = _best(drawn, self._num_samples) if self._request.chooses else drawn
        if self._request.max_tokens == 0:
            return [_without_tokens(completion) for completion in shown]
        return shown

    def index(self, prompt_index: int, completion: CompletionOutput) -> int:
        """Of the choice, among all of the response."""
        return prompt_index * self._num_samples + completion.index

    def write(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        index = self.index(prompt_index, completion)
        choice = CompletionChoice(
            index=index,
            text=completion.text,
            logprobs=None,
            finish_reason=public_finish_reason(completion),
            stop_reason=completion.stop_reason,
        )
        if self._request.return_token_ids:
            choice.token_ids = completion.token_ids
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        if index not in self._begun:
            self._begun.add(index)
            self._begin(choice, prompt_index, output)
        if self._request.logprobs is not None and completion.logprobs is not None:
            new = self._columns.write(completion.token_ids, completion.logprobs, self._offsets[index])
            choice.logprobs = new if choice.logprobs is None else choice.logprobs.followed_by(new)
        return choice

    def _begin(self, choice: CompletionChoice, prompt_index: int, output: RequestOutput) -> None:
        token_ids = output.prompt_token_ids
        if self._request.return_token_ids:
            choice.prompt_token_ids = list(token_ids)
        if self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_logprobs[prompt_index])
        if not self._request.echo:
            return
        prompt = output.prompt
        if prompt is None:
            prompt = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        choice.text = prompt + choice.text
        if self._request.logprobs is not None:
            tokens = [self._tokenizer.token_bytes(token_id) for token_id in token_ids]
            offsets = self._offsets[choice.index]
            offsets.end_at(len(prompt), tokens)
            choice.logprobs = self._columns.write(token_ids, self._prompt_logprobs[prompt_index], offsets)


def _best(completions: Sequence[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The `count` likeliest by token, best first. They are numbered anew."""

    def mean_logprob(completion: CompletionOutput) -> float:
        return (completion.cumulative_logprob or 0.0) / max(len(completion.token_ids), 1)

    best = sorted(completions, key=mean_logprob, reverse=True)[:count]
    return [attrs.evolve(completion, index=index) for index, completion in enumerate(best)]


def _without_tokens(completion: CompletionOutput) -> CompletionOutput:
    """As if no token had been asked for: the engine draws one at least."""
    reason = completion.finish_reason
    return attrs.evolve(
        completion,
        text="",
        token_ids=[],
        logprobs=None if completion.logprobs is None else [],
        finish_reason=FinishReason.LENGTH if reason is FinishReason.STOP else reason,
        stop_reason=None,
    )


async def _whole_reply(
    head: ReplyHead, outputs: Outputs, writer: _ChoiceWriter, num_prompts: int
) -> Completion:
    usage = UsageCounter()
    choices: list[CompletionChoice] = []
    for _ in range(num_prompts):
        prompt_index, output = await outputs.next()
        usage.add_prompt(output)
        usage.completion_tokens += writer.count_tokens(output)
        shown = writer.completions(output)
        choices += [writer.write(prompt_index, output, completion) for completion in shown]
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
        self._text_frames: dict[int, Callable[[str], bytes]] = {}  # by choice, once that has begun

    def write(self, prompt_index: int, output: RequestOutput) -> bytes:
        if prompt_index not in self._counted_prompts:
            self._counted_prompts.add(prompt_index)
            self._usage.add_prompt(output)
        frames = []
        for completion in self._choices.completions(output):
            self._usage.completion_tokens += len(completion.token_ids)
            if completion.text or completion.finish_reason is not None or self._always_writes:
                frames.append(self._frame(prompt_index, output, completion))
        return b"".join(frames)

    def _frame(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        index = self._choices.index(prompt_index, completion)
        if completion.finish_reason is None and (text_frame := self._text_frames.get(index)) is not None:
            return text_frame(completion.text)
        choice = self._choices.write(prompt_index, output, completion)
        if not (self._always_writes or self._wants_continuous_usage):
            # The first piece of a choice may say more, and the last one does; between them is only text.
            self._text_frames[index] = self._framing.text_frames(
                lambda text: CompletionChoice(index=index, text=text)
            )
        return self._framing.frame(choice, self._running_usage())

    def end(self) -> bytes:
        return (self._framing.usage_frame(self._usage.usage()) if self._wants_usage else b"") + DONE

    def fail(self, failure: Failure) -> bytes:
        return last_frames(failure.detail)

    def _running_usage(self) -> Usage | None:
        return self._usage.usage() if self._wants_continuous_usage else None
