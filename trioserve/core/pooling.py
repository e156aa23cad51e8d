"""The engine core of models that pool: whole texts in, one result each out.

A text is computed in one step, by itself or among others, and holds nothing before and after it: there are no
blocks, no preemption and no plan ahead. A step takes those that wait in the order of the policy
(`trioserve.core.policy`), while they fit:

    waiting, by rank     [120 tokens][80][300][40]...          max_num_batched_tokens 512
    the step             [120 tokens][80][300]                 one after the other, without padding

The first that does not fit ends the step, as for generation: shorter ones behind it do not overtake, or their
tokens would make it wait once more. One that is longer than a whole step has a step of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import attrs

from trioserve.core.news import News
from trioserve.core.policy import WaitingRequests, ranking
from trioserve.core.pooling_request import PoolingRequest, PoolingResult, to_pooling_request
from trioserve.core.request import RequestStatus
from trioserve.core.stats import CacheEvents, CoreStats, Gauges, StepCounters
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trioserve.config import SchedulerConfig
    from trioserve.core.pooling_request import CorePoolingRequest
    from trioserve.worker.pooling_batch import PooledSequence, PoolingSequence

__all__ = ["PoolingCore", "PoolingPlan", "PoolingRunner"]


class PoolingRunner(Protocol):
    """What computes. Everything blocks, and is called in one and the same thread."""

    @property
    def kernels(self) -> str:
        """What computes the model, in words."""
        ...

    def pool(self, batch: Sequence[PoolingSequence]) -> Sequence[PooledSequence]:
        """Compute whole texts: one result for each, in the batch's order.

        The texts have at most `max_num_batched_tokens` tokens together, or there is only one; there are at
        most `max_num_seqs` of them, and their tasks may differ. That one cannot be computed is its own
        failure; what is raised ends the engine.
        """
        ...

    def free_weights(self) -> None:
        """Give their memory back; nothing can be pooled until they are loaded again."""
        ...

    def load_weights(self) -> None:
        """Read the same model again, after `free_weights`."""
        ...

    def close(self) -> None:
        """End all threads; nothing may be called afterwards, except this."""
        ...


@attrs.frozen(eq=False)
class PoolingPlan:
    """One step: whole texts."""

    requests: Sequence[PoolingRequest]

    @property
    def batch(self) -> Sequence[PoolingSequence]:
        return [request.sequence for request in self.requests]


class PoolingCore:
    """Runs texts, step by step, as `trioserve.core.engine.EngineCore` runs sequences; see there for the order
    of the calls, for threads and for errors."""

    # Invariants, checked by check():
    # - every request is in _waiting, or in the plan in flight, never in both;
    # - without a step in flight, no request is ABORTED.

    def __init__(
        self,
        runner: PoolingRunner,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._config = config
        self._max_model_len = max_model_len
        self._clock = clock
        self._requests: dict[int, PoolingRequest] = {}
        self._waiting: WaitingRequests[PoolingRequest] = WaitingRequests(ranking(config.policy))
        self._num_arrived = 0
        self._in_flight: PoolingPlan | None = None
        self._num_aborted = 0  # of those in flight
        self._is_held = False
        self._news: News[PoolingRequest] = News()
        self._counters = StepCounters()
        self._gauges_taken = self._gauges()

    # Requests

    @property
    def has_work(self) -> bool:
        """There is a text that has neither ended nor been aborted, or a step is in flight for one."""
        return bool(self._requests)

    def add(self, new: CorePoolingRequest) -> None:
        """Let a text wait for its turn.

        Raises:
          ValueError: the id is in use, or see `to_pooling_request`. Clients check it before they send one.
        """
        if new.request_id in self._requests:
            raise ValueError(f"request id {new.request_id} is in use")
        arrival = self._num_arrived + 1
        request = to_pooling_request(new, arrival=arrival, max_model_len=self._max_model_len)
        self._num_arrived = arrival
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop texts; ids of those that are gone already are fine.

        One that waits is gone when this returns; one that the step in flight computes, when `finish` has
        taken that back. Then its id is reported as free, as every id is that is aborted.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.status is RequestStatus.WAITING:
                self._waiting.remove(request)
                del self._requests[request_id]
            elif request is not None and request.status is RequestStatus.RUNNING:
                request.status = RequestStatus.ABORTED
                self._num_aborted += 1
            self._news.add_aborted(request_id, is_held=request_id in self._requests)

    # Steps

    def schedule(self) -> PoolingPlan | None:
        """The next step, None if there is nothing to do. Then comes `execute`, then `finish`.

        Under the deadline policy, texts whose deadline has passed end here.
        """
        assert self._in_flight is None, "the step before has not come back, or it failed"
        if self._is_held:
            return None
        if self._config.policy == "deadline":
            self._end_expired()
        requests = self._select()
        if not requests:
            return None
        for request in requests:
            self._waiting.remove(request)
            request.status = RequestStatus.RUNNING
        self._in_flight = PoolingPlan(requests)
        return self._in_flight

    def _select(self) -> list[PoolingRequest]:
        """Those that wait and fit into a step together; the first one always does."""
        room = self._config.max_num_batched_tokens
        selected: list[PoolingRequest] = []
        for request in self._waiting.first(self._config.max_num_seqs, preempted_only=False):
            room -= len(request.prompt_token_ids)
            if selected and room < 0:
                break
            selected.append(request)
        return selected

    def _end_expired(self) -> None:
        now = self._clock()
        for request in list(takewhile(lambda r: r.deadline <= now, self._waiting)):
            self._waiting.remove(request)
            self._end(request, FinishReason.DEADLINE)

    def execute(self, plan: PoolingPlan) -> Sequence[PooledSequence]:
        """Compute a step. Blocks; may run in another thread."""
        return self._runner.pool(plan.batch)

    def plan_ahead(self) -> None:
        """There is nothing to decide ahead: who is in the next step follows from who waits then."""

    def finish(self, plan: PoolingPlan, outputs: Sequence[PooledSequence]) -> None:
        """Take in what a step gave: one output for each of its texts, in their order."""
        assert plan is self._in_flight, "only the step in flight can come back, and only once"
        self._in_flight = None
        self._num_aborted = 0
        for request, output in zip(plan.requests, outputs, strict=True):
            self._counters.num_prompt_tokens += len(request.prompt_token_ids)
            if request.status is RequestStatus.ABORTED:
                del self._requests[request.request_id]
            else:
                request.pooled = output
                failed = output.data is None
                self._end(request, FinishReason.ERROR if failed else FinishReason.STOP)
        self._news.free_held()

    def _end(self, request: PoolingRequest, reason: FinishReason) -> None:
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        del self._requests[request.request_id]
        self._news.add(request)

    def take_result(self) -> PoolingResult:
        """Texts that have ended, and aborted ones that are freed, since the last call."""
        return PoolingResult.of(self._news.take(), self._news.take_freed())

    def take_freed(self) -> PoolingResult:
        """Of what `take_result` gives, only the aborted texts that are freed, at any time."""
        return PoolingResult(freed=self._news.take_freed())

    @property
    def has_freed(self) -> bool:
        """`take_freed` would give some."""
        return self._news.has_freed

    @property
    def step_in_flight(self) -> bool:
        return self._in_flight is not None

    # State

    def take_stats(self) -> CoreStats:
        """State and counters since the last call; there are no blocks to tell of."""
        counters, self._counters = self._counters, StepCounters()
        self._gauges_taken = self._gauges()
        return CoreStats.of(self._gauges_taken, counters, CacheEvents())

    @property
    def stats_changed(self) -> bool:
        """`take_stats` would show another state than last time."""
        return self._gauges() != self._gauges_taken

    def _gauges(self) -> Gauges:
        num_running = 0 if self._in_flight is None else len(self._in_flight.requests) - self._num_aborted
        is_full = bool(self._waiting) and (self._is_held or num_running == self._config.max_num_seqs)
        return Gauges(num_running, len(self._waiting), self._waiting.num_prompt_tokens, is_full, 0.0)

    @property
    def num_begun(self) -> int:
        """Texts of the step in flight."""
        return 0 if self._in_flight is None else len(self._in_flight.requests)

    def hold(self, *, new_only: bool) -> None:
        """Begin with no text from now on, until `release`; texts may still be added."""
        self._is_held = True

    def release(self) -> None:
        """End a `hold`."""
        self._is_held = False

    @property
    def is_held(self) -> bool:
        return self._is_held

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """There is nothing to forget: True."""
        return True

    def check(self) -> None:
        """Assert the invariants; for tests."""
        in_flight = [] if self._in_flight is None else list(self._in_flight.requests)
        assert {*self._waiting, *in_flight} == set(self._requests.values())
        assert len(self._waiting) + len(in_flight) == len(self._requests)
        assert all(request.status is RequestStatus.WAITING for request in self._waiting)
        states = {RequestStatus.RUNNING, RequestStatus.ABORTED}
        assert all(request.status in states for request in in_flight)
