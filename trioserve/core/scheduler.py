"""Decides which tokens of which requests the next step computes, and takes in what it gave.

Each step has one budget of tokens. Requests that run come first, then those that wait:

    running, in the order of admission     waiting, in the policy's order
    [decode 1][decode 1]...[prefill 300]   [prefill 198 of 700]           budget 512
                                           admitted with what is left

1. Every running request gets what it lacks: one token if it decodes, the rest of its prompt if the budget
   has not sufficed so far. When blocks run out, the policy's victim gives up its own and waits again, until
   there are enough or the victim is the request itself.
2. Waiting requests, a victim of this step among them, are admitted while there is budget, a free seat
   (`max_num_seqs`) and blocks for all their known tokens. The first that does not fit ends the step:
   smaller ones behind it do not overtake, or a large one might never be admitted.

A prompt larger than the budget is thus computed in chunks, beside the decodes. Whoever was admitted left
something of the budget to the next, so only the last of those that run can lack more than one token. Hence
every running request gets a share of every step, and no decode waits for a prefill.

What was rejected:
- Separate prefill and decode steps: every arrival would stop all streams for the length of its prompt.
- Blocks for a chunk at a time: two long prompts would be admitted on blocks that suffice for one, and one of
  them be preempted half-way, its work lost. (Output is not reserved: how long it gets, nobody knows.)
- Preempting for a waiting request: two requests could take turns in throwing away each other's work.
- Swapping a victim's blocks out instead of recomputing: it takes a second store and a second kind of step,
  and of what was not overwritten meanwhile the prefix cache finds the most anyway.
- Publishing blocks to the prefix cache when they are scheduled rather than computed: it would let two equal
  prompts of one step share, but make every attention kernel depend on the order of writes in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from trioserve.core.policy import FirstComeFirstServed
from trioserve.core.request import Request, RequestStatus
from trioserve.core.stats import CoreStats, StepCounters
from trioserve.core.stop import find_stop
from trioserve.worker.batch import ScheduledSequence, StepBatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioserve.config import SchedulerConfig
    from trioserve.core.kv_cache import KVCacheManager
    from trioserve.core.policy import SchedulingPolicy
    from trioserve.core.request import CoreRequest
    from trioserve.worker.batch import SampledToken

__all__ = ["Scheduler", "StepPlan"]


@attrs.frozen(eq=False)
class StepPlan:
    """One step: what the runner gets, and whose it is. `requests[i]` is that of `batch.sequences[i]`."""

    requests: Sequence[Request]
    batch: StepBatch


class Scheduler:
    """Owns all requests, from `add` until they finish or are aborted.

    One step at a time is in flight, from `schedule` to `update`. Meanwhile requests may be added and aborted:
    neither touches what the step reads, and the blocks of an aborted request that the step writes to are
    held until it is back. A step that fails never comes back, and nothing can be scheduled after it.
    """

    # Invariants, checked by check():
    # - every request is in _running or in _policy, never in both;
    # - only requests in _running hold blocks;
    # - without a step in flight, no request is ABORTED.

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        policy: SchedulingPolicy | None = None,
    ) -> None:
        assert kv_cache.num_tokens >= max_model_len, "the KV cache must hold at least one whole sequence"
        self._config = config
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._policy: SchedulingPolicy = FirstComeFirstServed() if policy is None else policy
        self._requests: dict[int, Request] = {}
        self._running: list[Request] = []
        self._num_arrived = 0
        self._in_flight: StepPlan | None = None
        self._num_aborted = 0  # requests in _running that nobody wants: the step in flight keeps them
        self._counters = StepCounters()
        self._gauges_taken = self._gauges()

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, new: CoreRequest) -> None:
        """Let a request wait for its turn. How many may wait is for those to limit who let clients in.

        Raises:
          ValueError: the id is in use, `max_tokens` is not set, or the prompt is empty or leaves no room for
              a token in the context window. Clients check all of it before they send a request.
        """
        if new.request_id in self._requests:
            raise ValueError(f"request id {new.request_id} is in use")
        request = self._to_request(new)
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._policy.add(request)

    def _to_request(self, new: CoreRequest) -> Request:
        prompt = list(new.prompt_token_ids)
        if not 0 < len(prompt) < self._max_model_len:
            raise ValueError(
                f"the prompt must have 1 to {self._max_model_len - 1} tokens (one less than max_model_len), "
                f"got {len(prompt)}"
            )
        if new.params.max_tokens is None:
            raise ValueError("max_tokens must be set")
        eos_token_ids = frozenset() if new.params.ignore_eos else self._eos_token_ids
        return Request(
            request_id=new.request_id,
            prompt_token_ids=prompt,
            params=new.params,
            seed=new.seed,
            streams=new.streams,
            priority=new.priority,
            cache_salt=new.cache_salt,
            arrival=self._num_arrived,
            eos_token_ids=eos_token_ids,
            stop_token_ids=eos_token_ids.union(new.params.stop_token_ids),
            max_known_tokens=min(len(prompt) + new.params.max_tokens, self._max_model_len),
        )

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests, whatever they are doing; ids of requests that are gone already are fine.

        Their blocks are free when this returns or, for a request that the step in flight computes, as soon
        as `update` has taken the step back.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.status is not RequestStatus.ABORTED:
                self._abort(request)

    def _abort(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            request.status = RequestStatus.ABORTED
            if request.in_flight:
                self._num_aborted += 1
            else:
                self._running.remove(request)
                self._forget(request)
        else:
            request.status = RequestStatus.ABORTED
            self._policy.remove(request)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._kv_cache.free(request)
        del self._requests[request.request_id]

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is no request. The algorithm is described at the module's head."""
        assert self._in_flight is None, "the step before has not come back, or it failed"
        shares: dict[Request, int] = {}
        budget = self._serve_running(shares, self._config.max_num_batched_tokens)
        self._admit_waiting(shares, budget)
        if not shares:
            assert not self._requests, "a request alone always gets its share"
            return None
        return self._launch(shares)

    def _serve_running(self, shares: dict[Request, int], budget: int) -> int:
        """Add each running request's number of tokens to `shares`; returns what is left of the budget."""
        # Preemption shortens the list from its end while it is walked.
        for request in self._running:
            assert budget > 0, "all that run were once served together, and none of them lacks more now"
            num_computed = request.num_computed_tokens
            num_tokens = min(request.num_known_tokens - num_computed, budget)
            if self._make_room(request, num_computed + num_tokens):
                shares[request] = num_tokens
                budget -= num_tokens
        return budget

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for the first `num_tokens` positions; False if the request itself had to give way."""
        while not self._kv_cache.extend(request, num_tokens):
            victim = self._policy.victim(self._running)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        assert len(self._running) > 1, "a request alone always fits into the KV cache"
        self._running.remove(victim)
        self._kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        self._policy.put_back(victim)
        self._counters.num_preemptions += 1

    def _admit_waiting(self, shares: dict[Request, int], budget: int) -> None:
        while budget > 0 and len(self._policy) and len(self._running) < self._config.max_num_seqs:
            request = self._policy.first()
            if not self._kv_cache.admit(request, self._kv_cache.find_cached(request)):
                break
            self._start(request)
            shares[request] = min(request.num_known_tokens - request.num_computed_tokens, budget)
            budget -= shares[request]

    def _start(self, request: Request) -> None:
        self._policy.remove(request)
        self._running.append(request)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
            self._counters.prefix_cache_queries += len(request.prompt_token_ids)
            self._counters.prefix_cache_hits += request.num_cached_tokens
        request.status = RequestStatus.RUNNING

    def _launch(self, shares: dict[Request, int]) -> StepPlan:
        sequences = []
        for request, num_tokens in shares.items():
            request.in_flight = True
            sequences.append(_to_sequence(request, num_tokens))
        self._in_flight = StepPlan(list(shares), StepBatch(sequences))
        return self._in_flight

    def update(self, plan: StepPlan, sampled: Sequence[SampledToken]) -> list[Request]:
        """Take in what a step gave: one token for each sequence with `samples`, in the batch's order.

        Returns the requests that have a new token, in that order, with their state advanced: a request that
        ended has its finish reason set, and its blocks are free. Aborted requests are not among them.
        """
        assert plan is self._in_flight, "only the step in flight can come back, and only once"
        sequences = plan.batch.sequences
        num_samples = sum(sequence.samples for sequence in sequences)
        assert len(sampled) == num_samples, f"{num_samples} sequences sampled, {len(sampled)} tokens came"
        self._in_flight = None
        self._num_aborted = 0
        tokens = iter(sampled)
        advanced, ended = [], []
        for request, sequence in zip(plan.requests, sequences, strict=True):
            token = next(tokens) if sequence.samples else None
            self._advance(request, sequence.start + len(sequence.token_ids))
            if token is not None and request.status is RequestStatus.RUNNING:
                _accept(request, token)
                advanced.append(request)
                self._counters.num_generation_tokens += 1
            if request.status is not RequestStatus.RUNNING:
                ended.append(request)
        if ended:
            self._forget_ended(ended)
        return advanced

    def _advance(self, request: Request, num_computed_tokens: int) -> None:
        """Even for an aborted request: what was computed may serve the next one with this prompt."""
        num_prompt_tokens = len(request.prompt_token_ids)
        if request.num_computed_tokens < num_prompt_tokens:
            self._counters.num_prompt_tokens += (
                min(num_computed_tokens, num_prompt_tokens) - request.num_computed_tokens
            )
        request.in_flight = False
        request.num_computed_tokens = num_computed_tokens
        self._kv_cache.publish(request)

    def _forget_ended(self, ended: Iterable[Request]) -> None:
        self._running = [request for request in self._running if not request.has_ended]
        for request in ended:
            self._forget(request)

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; False, and nothing done, while any request holds a block."""
        return self._kv_cache.reset_prefix_cache()

    def take_stats(self) -> CoreStats:
        """The state now; the counters start again from zero."""
        counters, self._counters = self._counters, StepCounters()
        self._gauges_taken = self._gauges()
        num_running, num_waiting, usage = self._gauges_taken
        return CoreStats(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_cache_usage=usage,
            num_preemptions=counters.num_preemptions,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
        )

    @property
    def stats_changed(self) -> bool:
        """The state differs from what was last taken, as it does after an abort without a step."""
        return self._gauges() != self._gauges_taken

    def _gauges(self) -> tuple[int, int, float]:
        return len(self._running) - self._num_aborted, len(self._policy), self._kv_cache.usage

    def check(self) -> None:
        """Assert the invariants, in time linear in the number of blocks and requests; for tests."""
        waiting = list(self._policy)
        assert len(self._running) <= self._config.max_num_seqs
        assert {*self._running, *waiting} == set(self._requests.values())
        assert len(self._running) + len(waiting) == len(self._requests)
        assert all(request.status is RequestStatus.RUNNING or request.in_flight for request in self._running)
        assert not any(r.block_table or r.num_computed_tokens or r.in_flight for r in waiting)
        for request in self._requests.values():
            assert request.num_computed_tokens < request.num_known_tokens <= request.max_known_tokens
        self._kv_cache.check(self._running)


def _to_sequence(request: Request, num_tokens: int) -> ScheduledSequence:
    start = request.num_computed_tokens
    end = start + num_tokens
    return ScheduledSequence(
        request_id=request.request_id,
        start=start,
        token_ids=request.tokens(start, end),
        block_table=request.block_table,
        samples=end == request.num_known_tokens,
        params=request.params,
        seed=request.seed,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        stop_token_ids=request.stop_token_ids,
    )


def _accept(request: Request, token: SampledToken) -> None:
    request.output_token_ids.append(token.token_id)
    request.unreported.append(token)
    stop = find_stop(request)
    if stop is not None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = stop.reason
        request.stop_token_id = stop.token_id
