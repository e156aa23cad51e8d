"""Starting and ending requests on one engine."""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.audio_input import AudioInput
from trioserve.errors import ClosedError, EngineDeadError, EngineRestartingError, InvalidRequestError
from trioserve.frontend.admission import Place
from trioserve.frontend.arguments import check_request_id, sampling_params_or_default
from trioserve.frontend.channel import OutputChannel
from trioserve.frontend.completion import Completion
from trioserve.frontend.input_processor import Routing
from trioserve.frontend.logprobs import PromptLogprobs
from trioserve.link.messages import Add
from trioserve.sampling_params import RequestOutputKind, SamplingParams
from trioserve.token_constraints import TokenConstraints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trioserve.beam_search_params import BeamSearchParams
    from trioserve.config import EngineConfig
    from trioserve.frontend.input_processor import InputProcessor
    from trioserve.frontend.output_processor import OutputProcessor
    from trioserve.frontend.prompts import AudioPrompt, PromptType
    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.link.client import EngineCoreClient
    from trioserve.link.messages import AddPooling
    from trioserve.outputs import FinishReason, RequestOutput
    from trioserve.pooling_params import PoolingParams

__all__ = ["Requests", "Round", "SubmittedRequest"]

log = logging.getLogger("trioserve.requests")

_MAX_HEARING = 4
"""Completions that one request may have of its audio; all of them are sent at once."""


@attrs.frozen(kw_only=True, eq=False)
class Round:
    """What the engine is to do for a channel: one sequence for each of its completions."""

    prompts: Sequence[bytes]
    """Per completion, int32 token ids."""
    params: SamplingParams
    routing: Routing
    constraints: TokenConstraints = attrs.field(factory=TokenConstraints)
    audio: AudioInput | None = None


class Requests:
    """The requests of one AsyncLLM.

    Every request has a channel, from `submit` or `register` to `release`. What takes a channel into account
    is synchronous, so nothing is left behind wherever a cancellation strikes.
    """

    def __init__(
        self,
        config: EngineConfig,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        tokenizer: Tokenizer,
        get_client: Callable[[], EngineCoreClient],
    ) -> None:
        """`get_client` raises EngineDeadError, EngineRestartingError or ClosedError where there is no engine
        (any more, or yet)."""
        self.inputs = inputs
        self.tokenizer = tokenizer
        self.admission = outputs.admission
        self._logs = config.log.requests
        self._requeues = config.supervision.requeue and config.supervision.restart == "on-failure"
        # Those that wait for the next engine core, from `end_of_engine` to `resubmit`; any of them may have
        # been released or aborted meanwhile.
        self._requeued: list[OutputChannel] = []
        self._outputs = outputs
        self._get_client = get_client
        self._sequence_ids = itertools.count(1)
        self._seeds = random.Random(config.model.seed)

    async def submit(
        self,
        prompt: PromptType,
        params: SamplingParams | None,
        routing: Routing,
        *,
        request_id: str | None,
        has_place: bool = False,
    ) -> OutputChannel:
        """Start a request; see `AsyncLLM.submit`. `has_place`: the caller holds one, so it is let in."""
        arrival_time = time.monotonic()
        self._get_client()
        routing.check()
        check_request_id(request_id)
        params = sampling_params_or_default(params)
        with Place(self.admission, 0) if has_place else self.admission.reserve(params.n) as place:
            tokenized = await self.inputs.tokenize(prompt)
            params = self.inputs.fit_params(params, len(tokenized.token_ids))
            constraints = await self.inputs.constraints(params)
            if not has_place:
                self.admission.check_tokens(params.n * len(tokenized.token_ids))
            if tokenized.audio is not None:
                if tokenized.audio.search is not None:
                    self.inputs.check_search(params)
                await self._make_way_for_audio(params)
            channel = self.open_channel(request_id, params)
            channel.prompt = tokenized.text
            channel.begin(tokenized.token_ids, self._completions(params, tokenized.token_ids))
            channel.arrival_time = arrival_time
            channel.prompt_logprobs = self._prompt_logprobs(params, len(tokenized.token_ids))
            prompts = [array("i", tokenized.token_ids).tobytes()] * params.n
            work = Round(
                prompts=prompts,
                params=params,
                routing=routing.for_prompt(tokenized),
                constraints=constraints,
                audio=tokenized.audio,
            )
            channel.place = place.hand_over()
            self.start(channel, work)
        return channel

    async def align(self, prompt: AudioPrompt, token_ids: Sequence[int]) -> Sequence[float]:
        """See `AsyncLLM.align`."""
        if not token_ids:
            raise InvalidRequestError("There is no token to align.", parameter="token_ids")
        num_prompt_tokens = len(prompt.token_ids)
        whole = attrs.evolve(prompt, token_ids=[*prompt.token_ids, *token_ids])
        tokenized = await self.inputs.tokenize(whole)
        assert tokenized.audio is not None
        client = self._get_client()
        await client.wait_room()
        audio = tokenized.audio
        times: list[float] = await client.call(
            "align_audio", audio.digest, audio.samples, list(tokenized.token_ids), num_prompt_tokens
        )
        return times

    async def _make_way_for_audio(self, params: SamplingParams) -> None:
        """Wait until the engine core has read the most of what it was sent; each sequence will bring 2 MB.

        Raises:
          InvalidRequestError: there are too many.
        """
        if params.n > _MAX_HEARING:
            raise InvalidRequestError(
                f"n must be at most {_MAX_HEARING} with audio, got {params.n}.", parameter="n"
            )
        await self._get_client().wait_room()

    def open_channel(self, request_id: str | None, params: SamplingParams) -> OutputChannel:
        """Without completions, and not known to anybody yet."""
        return OutputChannel(
            request_id=request_id or f"req-{uuid.uuid4().hex}",
            kind=params.output_kind,
            # A stop string can be found only where the text is made; and all logprobs of an answer may be too
            # many for one message.
            streams=params.output_kind is not RequestOutputKind.FINAL_ONLY
            or bool(params.stop)
            or (params.reports_logprobs and params.max_tokens != 1),
        )

    def _completions(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> list[Completion]:
        return [Completion(index, params, self.tokenizer, prompt_token_ids) for index in range(params.n)]

    def _prompt_logprobs(self, params: SamplingParams, prompt_length: int) -> PromptLogprobs | None:
        if params.prompt_logprobs is None:
            return None
        return PromptLogprobs(
            prompt_length,
            self.tokenizer,
            flat=params.flat_logprobs,
            shown_once=params.output_kind is RequestOutputKind.DELTA,
        )

    def register(self, channel: OutputChannel) -> None:
        """Make a channel known (for `abort`, and the engine's end) before its first round."""
        self._outputs.register(channel, {})

    def start(self, channel: OutputChannel, work: Round) -> None:
        """Send a round to the engine. Not a checkpoint; if it raises, the channel is released.

        Raises:
          EngineDeadError: the engine core is gone.
          OverloadedError: it is too far behind to take it.
          LoRANotFoundError: its adapter has been unloaded.
          ClosedError: the AsyncLLM was closed.
        """
        if channel.is_counted:
            self.log(channel.request_id, len(channel.prompt_token_ids), work.params)
        self._outputs.register(channel, {})
        channel.deadline = trio.current_effective_deadline()
        try:
            client = self._get_client()
            if channel.adapter is None and work.routing.adapter is not None:
                channel.adapter = work.routing.adapter.hold()
            ids = self._register_sequences(channel)
            adds = [self._make_add(i, index, channel, work) for index, i in enumerate(ids)]
            self._send(itertools.repeat(client.add), channel, adds)
        except BaseException:
            self.release(channel)
            raise

    def start_pooling(
        self, channel: OutputChannel, adds: Sequence[AddPooling], params: PoolingParams
    ) -> None:
        """As `start`: send texts to an engine that pools, one for each of the channel's completions. Their
        numbers and the time that is left are filled in here. If the first one is taken, all are."""
        self.log(channel.request_id, sum(add.num_prompt_tokens for add in adds), params)
        self._outputs.register(channel, {})
        channel.deadline = trio.current_effective_deadline()
        try:
            client = self._get_client()
            sends = itertools.chain([client.add], itertools.repeat(client.add_again))
            self._send(sends, channel, _numbered(adds, self._register_sequences(channel), channel.deadline))
        except BaseException:
            self.release(channel)
            raise

    def _register_sequences(self, channel: OutputChannel) -> list[int]:
        unfinished = [completion for completion in channel.completions if completion.finish_reason is None]
        sequences = {next(self._sequence_ids): completion for completion in unfinished}
        self._outputs.register(channel, sequences)
        return list(sequences)

    def _send(
        self,
        sends: Iterable[Callable[[Add | AddPooling], None]],
        channel: OutputChannel,
        adds: Sequence[Add | AddPooling],
    ) -> None:
        for send, add in zip(sends, adds, strict=False):  # there may be more ways than adds
            send(add)
            self.admission.note_sent(add.num_prompt_tokens)
        if self._requeues:
            channel.adds = adds
            channel.num_cores += 1

    def log(
        self,
        request_id: str,
        num_prompt_tokens: int,
        params: SamplingParams | BeamSearchParams | PoolingParams,
    ) -> None:
        """A line about a request, where these are wanted."""
        if self._logs:
            log.info("%s: %d prompt tokens, %r", request_id, num_prompt_tokens, params)

    def _make_add(self, sequence_id: int, index: int, channel: OutputChannel, work: Round) -> Add:
        params = work.params
        if params.n > 1:
            # A prompt's logprobs are the same for all of its completions, so one of them reports them.
            params = attrs.evolve(params, n=1, prompt_logprobs=None if index else params.prompt_logprobs)
        return Add(
            request_id=sequence_id,
            prompt_token_ids=work.prompts[index],
            params=params,
            constraints=work.constraints,
            seed=self._seed(work.params, index),
            streams=channel.streams,
            time_left=_time_left(channel.deadline),
            priority=work.routing.priority,
            cache_salt=work.routing.cache_salt,
            lora=None if channel.adapter is None else channel.adapter.key,
            audio=work.audio,
        )

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Of n completions, number i is what a request of its own with seed + i would give."""
        return self._seeds.getrandbits(63) if params.seed is None else params.seed + index

    def release(self, channel: OutputChannel) -> None:
        """Forget a request here, and abort what of it the engine still runs. Not a checkpoint. A second call
        does nothing."""
        self._abort_sequences(self._outputs.release(channel))
        if channel.adapter is not None:
            channel.adapter.let_go()
            channel.adapter = None

    def abort(self, request_ids: Iterable[str]) -> None:
        """End every request of these names with finish reason ABORT. Not a checkpoint."""
        self._abort_sequences(self._outputs.abort(frozenset(request_ids)))

    def abort_all(self) -> None:
        self._abort_sequences(self._outputs.abort_all())

    def count_end(
        self, reason: FinishReason, num_prompt_tokens: int, num_generation_tokens: int, seconds: float
    ) -> None:
        """A request whose channel is not counted has ended."""
        self._outputs.count_end(reason, num_prompt_tokens, num_generation_tokens, seconds)

    def _abort_sequences(self, sequence_ids: list[int]) -> None:
        if not sequence_ids:
            return
        try:
            client = self._get_client()
        except (EngineDeadError, EngineRestartingError, ClosedError):
            return  # they have ended with it, or wait for the next one
        self._outputs.note_aborts(sequence_ids)
        client.abort(sequence_ids)

    # The engine's end, and the next one

    def end_of_engine(self, error: Exception, *, requeue: bool) -> None:
        """The engine core is gone: raise `error` at whoever waits for something. Not a checkpoint.

        With `requeue`, requests (or their rounds) of which nothing has come yet, and whose deadline has not
        passed, wait for `resubmit` instead, or for another call of this: unless they have seen two cores die,
        which may be their doing. `SupervisionConfig.requeue` must be set for it.
        """
        self.admission.reset()
        self._requeued = self._outputs.fail_all(error, keep=requeue)
        for channel in self._requeued:  # under new numbers: the old ones may still be on their way here
            self._register_sequences(channel)

    def resubmit(self) -> None:
        """Send the requests that wait for it to the core that `get_client` gives now, all of them: they have
        been let in. Not a checkpoint. Where there is no core again, they go on waiting.

        Raises what `get_client` raises.
        """
        client = self._get_client()
        requeued, self._requeued = self._requeued, []
        for channel in requeued:
            if ids := self._outputs.live_sequences(channel):
                self._resubmit(client, channel, ids)

    def _resubmit(self, client: EngineCoreClient, channel: OutputChannel, ids: Sequence[int]) -> None:
        adds = _numbered(channel.adds, ids, channel.deadline)
        self._send(itertools.repeat(client.add_again), channel, adds)


@attrs.frozen(eq=False)
class SubmittedRequest:
    """A request whose prompt is there, as a source for a `RequestStream`."""

    channel: OutputChannel
    _requests: Requests

    @property
    def exhausted(self) -> bool:
        return self.channel.exhausted

    async def take(self) -> RequestOutput:
        return await self.channel.take()

    def release(self) -> None:
        self._requests.release(self.channel)

    async def aclose(self) -> None:
        """There is nothing to close, and this is no checkpoint."""


def _numbered(
    adds: Sequence[Add | AddPooling], ids: Sequence[int], deadline: float
) -> Sequence[Add | AddPooling]:
    """The same, to be sent now under these numbers."""
    time_left = _time_left(deadline)
    return [attrs.evolve(add, request_id=i, time_left=time_left) for i, add in zip(ids, adds, strict=True)]


def _time_left(deadline: float) -> float | None:
    """Seconds until then; None if there is no deadline."""
    time_left = deadline - trio.current_time()
    return None if time_left == math.inf else max(time_left, 0.0)
