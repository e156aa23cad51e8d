"""A request's own channel: written by the one reader task, drained by the one consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve.outputs import RequestMetrics, RequestOutput
from trioserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.frontend.completion import Completion

__all__ = ["OutputChannel"]


class OutputChannel:
    """What a request gives, between the reader and the consumer.

    The writer never waits: it changes the completions and calls `notify`. A consumer that is behind takes
    everything pending at once. So nothing is queued, and the memory is what the completions hold: at most
    n times max_tokens. An engine's death arrives as an item too: `take` raises it.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        completions: Sequence[Completion],
        *,
        kind: RequestOutputKind,
        streams: bool,
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.completions = completions
        self.streams = streams
        """The engine sends tokens as they come; else all at the end, when nobody can tell the first one's
        time."""
        self.num_cached_tokens = 0
        self.arrival_time = arrival_time
        """Of `time.monotonic()`, as are the next two."""
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.exhausted = False
        """True once `take` has returned the last output or raised."""
        self.watcher: Callable[[], None] | None = None
        """Called whenever there are news, beside waking the consumer."""
        self._prompt = prompt
        self._kind = kind
        self._error: Exception | None = None
        self._consumer = trio.lowlevel.ParkingLot()

    @property
    def finished(self) -> bool:
        """Every completion has ended; the last output may not have been taken yet."""
        return all(completion.finish_reason is not None for completion in self.completions)

    @property
    def has_news(self) -> bool:
        """`take` would return at once."""
        if self._error is not None:
            return True
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self.finished
        return any(completion.has_news for completion in self.completions)

    def notify(self) -> None:
        """Wake the consumer, if there is something for it."""
        if self.has_news:
            self._consumer.unpark_all()
            if self.watcher is not None:
                self.watcher()

    def fail(self, error: Exception) -> None:
        """Let `take` raise `error`, after nothing else: what was pending is lost with the engine."""
        self._error = error
        self.notify()

    async def take(self) -> RequestOutput:
        """Everything that is new, as one output; waits until there is something. Always a checkpoint, and
        cancelling it loses nothing.

        Raises:
          EngineDeadError: the engine died under the request.
        """
        if self.has_news:
            await trio.lowlevel.checkpoint()
        while not self.has_news:
            await self._consumer.park()
        return self.take_nowait()

    def take_nowait(self) -> RequestOutput:
        """As `take`, where `has_news` is true."""
        if self._error is not None:
            self.exhausted = True
            raise self._error
        finished = self.exhausted = self.finished
        everything = self._kind is RequestOutputKind.FINAL_ONLY or (
            finished and self._kind is RequestOutputKind.CUMULATIVE
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[
                completion.take() for completion in self.completions if everything or completion.has_news
            ],
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self._metrics() if finished else None,
        )

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            last_token_time=self.last_token_time,
            num_generation_tokens=sum(completion.num_tokens for completion in self.completions),
        )
