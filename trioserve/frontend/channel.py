"""A request's own channel: written by the one reader task, drained by the one consumer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import attrs
import trio

from trioserve.frontend.adapters import Adapter
from trioserve.frontend.admission import Place
from trioserve.frontend.completion import Completion
from trioserve.frontend.logprobs import PromptLogprobs
from trioserve.link.messages import Add, AddPooling
from trioserve.outputs import FinishReason, RequestMetrics, RequestOutput
from trioserve.sampling_params import RequestOutputKind

__all__ = ["OutputChannel"]

_MOST_CORES = 2
"""To which a round is given, one after the other: it may be what they die of."""

_CUT_SHORT = {FinishReason.ABORT, FinishReason.ERROR, FinishReason.DEADLINE}


@attrs.define(eq=False, kw_only=True)
class OutputChannel:
    """What a request gives, between the reader and the consumer.

    The writer never waits: it changes the completions and calls `notify`. A consumer that is behind takes
    everything pending at once. So nothing is queued, and the memory is what the completions hold: at most
    n times max_tokens. An engine's death arrives as an item too: `take` raises it.

    Some requests (streaming input, beam search) run in rounds, each with completions of its own: `begin`
    starts the next one.
    """

    request_id: str
    kind: RequestOutputKind
    streams: bool
    """The engine sends tokens as they come; else all at the end, and nobody can tell the first one's time."""
    prompt: str | None = None
    """Its text, where that is known."""
    prompt_token_ids: Sequence[int] = ()
    """Of this round, as are the completions."""
    prompt_logprobs: PromptLogprobs | None = None
    """None where none were asked for."""
    completions: Sequence[Completion] = ()
    expects_input: bool = False
    """More rounds may come: the end of its completions is not the request's, unless it was cut short."""
    is_counted: bool = True
    """Its completions' ends are request ends in the metrics, and each round is one in the log."""
    arrival_time: float = attrs.field(factory=time.monotonic)
    """Of `time.monotonic()`, as are the next two. Of this round."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_cached_tokens: int = 0
    exhausted: bool = False
    """True once `take` has returned the last output or raised."""
    was_aborted: bool = False
    """By its name. Between rounds it is up to whoever begins them to end the request."""
    watcher: Callable[[], None] | None = None
    """Called whenever there are news, beside waking the consumer."""
    place: Place | None = None
    """Each sequence of its completions leaves it at its end. None where somebody holds it for all rounds."""
    adapter: Adapter | None = None
    """Held for it, from its first round to its release."""
    deadline: float = math.inf
    """Of trio's clock: that of the scope in which the round was begun."""
    adds: Sequence[Add | AddPooling] = ()
    """What the engine was sent for this round, kept while another engine could take it over: until anything
    has come of it (of texts that are pooled: those of which nothing has come). Empty where that is not
    wanted."""
    num_cores: int = 0
    """Engine cores that were given this round."""
    _error: Exception | None = attrs.field(default=None, init=False)
    _consumer: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _deliver: Callable[[RequestOutput], bool] | None = attrs.field(default=None, init=False)
    """Of a consumer in `forward`. Only while that is parked: one that was woken, or cancelled, wants none."""

    @property
    def round_has_ended(self) -> bool:
        """Every completion has ended; their last output may not have been taken yet."""
        # Here and in `has_news`, which are asked for each token, a generator would cost more than the rest.
        for completion in self.completions:  # noqa: SIM110
            if completion.finish_reason is None:
                return False
        return True

    @property
    def finished(self) -> bool:
        """The request has ended; the last output may not have been taken yet."""
        if not self.expects_input:
            return self.round_has_ended
        return any(completion.finish_reason in _CUT_SHORT for completion in self.completions)

    @property
    def can_start_anew(self) -> bool:
        """Another core may begin its round once more, and nobody will notice: nothing has come of it."""
        return (
            bool(self.adds)
            and self.num_cores < _MOST_CORES
            and not self.round_has_ended
            and self.deadline > trio.current_time()
        )

    @property
    def has_news(self) -> bool:
        """`take` would return at once."""
        if self._error is not None:
            return True
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return self.finished
        for completion in self.completions:  # noqa: SIM110
            if completion.has_news:
                return True
        return False

    def begin(self, prompt_token_ids: Sequence[int], completions: Sequence[Completion]) -> None:
        """The next round: what comes from now on is theirs."""
        self.prompt_token_ids, self.completions = prompt_token_ids, completions
        self.arrival_time = time.monotonic()
        self.first_token_time = self.last_token_time = None
        self.num_cores = 0

    def end_input(self) -> None:
        """There will be no other round: the last output is what this one gave, or, of a DELTA stream, only
        that it has ended."""
        self.expects_input = False
        for completion in self.completions:
            completion.has_news = True
        self.notify()

    def notify(self) -> None:
        """Hand on what there is, or wake the consumer for it."""
        if new := self._deliverable():
            if self._has_delivered(new):
                return
        elif not self.has_news:
            return
        self._consumer.unpark_all()
        if self.watcher is not None:
            self.watcher()

    def fail(self, error: Exception) -> None:
        """Let `take` raise `error`, after nothing else: what was pending is lost with the engine. The first
        error counts."""
        self._error = self._error or error
        self.notify()

    async def wait(self) -> None:
        """Wait for news. Always a checkpoint."""
        if self.has_news:
            await trio.lowlevel.checkpoint()
        while not self.has_news:
            await self._consumer.park()

    async def take(self) -> RequestOutput:
        """Everything that is new, as one output; waits until there is something. Always a checkpoint, and
        cancelling it loses nothing.

        Raises:
          EngineDeadError: the engine died under the request.
          InvalidRequestError: the engine refused it.
        """
        await self.wait()
        return self.take_nowait()

    def take_nowait(self) -> RequestOutput:
        """As `take`, where `has_news` is true."""
        self.check()
        self.exhausted = self.finished
        return self._output(finished=self.exhausted)

    def _output(self, *, finished: bool) -> RequestOutput:
        everything = self.kind is RequestOutputKind.FINAL_ONLY or (
            finished and self.kind is RequestOutputKind.CUMULATIVE
        )
        return self._output_of(
            [completion for completion in self.completions if everything or completion.has_news],
            finished=finished,
        )

    def _output_of(self, completions: Sequence[Completion], *, finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.take(),
            outputs=[completion.take() for completion in completions],
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self._metrics() if finished else None,
        )

    async def forward(self, deliver: Callable[[RequestOutput], bool]) -> None:
        """Have `deliver` called with what comes from now on, at once, in the task that brings it: so nobody
        has to be woken for it. `deliver` must not wait.

        Returns once `deliver` has returned False, or there is something that only `take` gives: the last
        output, an error (also one that `deliver` has raised), or news that are there already. A checkpoint
        only where it waits. After a cancellation `deliver` is not called any more.
        """
        if not self.has_news:
            self._deliver = deliver
            try:
                await self._consumer.park()
            finally:
                self._deliver = None

    def _deliverable(self) -> list[Completion]:
        """Those with news, if somebody is in `forward` and they are not only for `take`. One look at each
        completion, where `has_news` and `finished` take two."""
        if self._deliver is None or not self._consumer or self._error is not None:
            return []
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return []
        new, have_ended = [], True
        for completion in self.completions:
            if completion.has_news:
                new.append(completion)
            if completion.finish_reason is None:
                have_ended = False
        return [] if (have_ended or self.expects_input) and self.finished else new

    def _has_delivered(self, new: Sequence[Completion]) -> bool:
        """False: what they had is delivered or lost, and the consumer is to be woken."""
        assert self._deliver is not None
        try:
            return self._deliver(self._output_of(new, finished=False))
        except Exception as error:  # the consumer's to handle, and not of whoever brings news
            self._error = error
            return False

    def check(self) -> None:
        """Raise the error that `fail` has left, if any."""
        if self._error is not None:
            self.exhausted = True
            raise self._error

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            last_token_time=self.last_token_time,
            num_generation_tokens=sum(completion.num_tokens for completion in self.completions),
        )
