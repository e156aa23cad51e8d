"""Decides which tokens of which requests the next step computes, and takes in what it gave.

Each step has one budget of tokens. Requests that run come first, then those that wait, both in the order of
the policy (`trioserve.core.policy`), and what is left goes to drafts:

    running, by rank                                 waiting, by rank            drafts
    [decode 1][prefill 256 of 4000][decode 1]...     [prefill 198 of 700]        [+5][+5]...    budget 512
                                                     admitted with what is left

1. Every running request gets at least one token, so no decode waits for a prefill; a prefill gets what the
   others leave. Where some decode, prompts together get `prefill_beside_decodes` tokens or an eighth of what
   all who wait lack, for the step's length is the time that everyone waits (`StepBudget`). If others share
   the step, a long prompt (one that lacks more than `long_prefill_token_threshold`) gets no more than that,
   and no more than half of what prompts may get if other prompts wait, too.
   When blocks run out, the request that ranks last gives up its own and waits again, until there are enough
   or it is the request itself.
2. Waiting requests, a victim of this step among them, are admitted while there is budget, a free seat
   (`max_num_seqs`) and blocks for all their known tokens. The first that does not fit ends the step: smaller
   ones behind it do not overtake, or a large one might never be admitted. Only a long prompt that waits for
   one of the few places for long prompts (`max_long_partial_prefills`) lets others pass: its turn comes when
   that place is free, whoever has passed meanwhile. And one that waits for a place for its adapter (of which
   those that run have `max_loras` different ones at most) does, for some time (`AdapterPlaces`). Of
   different audio, one begins in a step (`StepBudget`).
3. Sequences that draw in this step may bring drafts of what they will draw, as far as budget and free blocks
   go: each draft that proves right saves a step. Nobody is preempted for a guess.

One step is in flight at a time. Meanwhile the next one is planned (`plan_ahead`): who gets how much of it,
and the blocks for that. What it takes to know who gets what is known before the step is back: it computes
its share, and draws one token if it reaches the end of what is known. When it is back (`update`), `schedule`
drops from the plan who has ended or was aborted, admits who waits, and only then reads the token ids. So no
work is done for a request that is gone, and a step never works on a state that is not true.

    step k      |---------------- runs ----------------|
    meanwhile    send k-1 | plan k+1 | arrivals, aborts  update k | launch k+1
    step k+1                                                      |------------ runs ---- ...
What was weighed against it is in docs/engine.md.
"""

from __future__ import annotations

import time
from bisect import insort
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from trioserve.core.adapter_places import AdapterPlaces
from trioserve.core.admission import to_request
from trioserve.core.launch import Launcher
from trioserve.core.news import News
from trioserve.core.policy import WaitingRequests, ranking
from trioserve.core.progress import take_in
from trioserve.core.request import RequestStatus
from trioserve.core.stats import CoreStats, Gauges, StepCounters
from trioserve.core.step_budget import StepBudget
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trioserve.config import SchedulerConfig
    from trioserve.core.admission import RequestLimits
    from trioserve.core.kv_cache import KVCacheManager
    from trioserve.core.launch import StepPlan
    from trioserve.core.proposer import Proposer
    from trioserve.core.request import CoreRequest, Request
    from trioserve.worker.batch import SequenceOutput

__all__ = ["Scheduler"]

_MAX_PASSED = 8
"""Long prompts that are looked at in vain per step: each look is a search in the prefix cache."""


class Scheduler:
    """Owns all requests, from `add` until they finish or are aborted.

    One step at a time is in flight, from `schedule` to `update`. Meanwhile requests may be added and aborted:
    neither touches what the step reads, and the blocks of an aborted request that the step writes to are
    held until it is back. A step that fails never comes back, and nothing can be scheduled after it.
    """

    # Invariants, checked by check():
    # - every request is in _running or in _waiting, never in both, and both are sorted by rank;
    # - only requests in _running hold blocks;
    # - requests in _running have max_loras different adapters at most;
    # - without a step in flight, no request is ABORTED;
    # - _planned names running requests only, each with at least one token.

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        limits: RequestLimits,
        *,
        proposer: Proposer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert kv_cache.can_hold(limits.max_model_len, config.max_num_batched_tokens), (
            "the KV cache must hold at least one whole sequence"
        )
        assert config.max_num_seqs <= config.max_num_batched_tokens, "every seat needs a token of each step"
        self._config = config
        self._kv_cache = kv_cache
        self._limits = limits
        self._proposer = proposer
        self._launcher = Launcher(config.max_num_batched_tokens, kv_cache, proposer)
        self._clock = clock
        self._rank = ranking(config.policy)
        self._requests: dict[int, Request] = {}
        self._running: list[Request] = []
        self._waiting: WaitingRequests[Request] = WaitingRequests(self._rank)
        self._num_arrived = 0
        self._planned: dict[Request, int] | None = None
        self._in_flight: StepPlan | None = None
        self._num_aborted = 0  # requests in _running that nobody wants: the step in flight keeps them
        self._lacks_blocks = False  # for who waits first, as the last step found
        self._lacks_adapters = False  # likewise: places for them
        self._holds_new = self._holds_all = False
        self.news: News[Request] = News()
        self._counters = StepCounters()
        self._gauges_taken = self._gauges()

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_begun(self) -> int:
        return len(self._running) + self._waiting.num_preempted

    @property
    def step_in_flight(self) -> bool:
        return self._in_flight is not None

    # Arrivals and departures

    def add(self, new: CoreRequest) -> None:
        """Let a request wait for its turn. How many may wait is for those to limit who let clients in.

        Raises:
          ValueError: the id is in use, `max_tokens` is not set, or the prompt is empty or leaves no room for
              a token in the context window. Clients check all of it before they send a request.
        """
        if new.request_id in self._requests:
            raise ValueError(f"request id {new.request_id} is in use")
        request = to_request(new, self._limits, arrival=self._num_arrived + 1)
        request.drafter = None if request.is_search else self._proposer.begin(request)
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests, whatever they are doing; ids of requests that are gone already are fine.

        Their blocks are free when this returns or, for a request that the step in flight computes, as soon
        as `update` has taken the step back. Then `news` has their ids, of all of them.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.status is not RequestStatus.ABORTED:
                self._end(request, RequestStatus.ABORTED)
            self.news.add_aborted(request_id, is_held=request_id in self._requests)

    def _end(self, request: Request, status: RequestStatus) -> None:
        """Take a request out, or leave that to `update` if the step in flight computes it."""
        waits = request.status in {RequestStatus.WAITING, RequestStatus.PREEMPTED}
        request.status = status
        if waits:
            self._waiting.remove(request)
            self._forget(request)
        elif request.in_flight:
            self._num_aborted += 1
        else:
            self._running.remove(request)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._kv_cache.free(request)
        del self._requests[request.request_id]

    # The next step

    def plan_ahead(self) -> None:
        """Decide, while a step is in flight, what those that run will get of the next one. Where that would
        take a preemption, nothing is decided: `schedule` will do it, when the blocks of who ends in this step
        are back. The prompts of those that wait are hashed for the prefix cache, too."""
        if self._config.plan_ahead and not self._holds_all:
            self._planned = self._serve_running(ahead=True)
            for request in islice(self._waiting, self._config.max_num_seqs - len(self._running)):
                self._kv_cache.hash_prompt(request)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do. The algorithm is described at the module's head.

        Under the deadline policy, requests whose deadline has passed end here.
        """
        assert self._in_flight is None, "the step before has not come back, or it failed"
        shares, self._planned = self._planned, None
        if self._holds_all:
            return None
        if self._config.policy == "deadline":
            self._end_expired()
        if shares is None:
            shares = self._serve_running(ahead=False) or {}
        shares = {request: count for request, count in shares.items() if not request.has_ended}
        self._admit_waiting(shares)
        if not shares:
            assert self._holds_new or not self._requests, "a request alone always gets its share"
            return None
        self._in_flight = self._launcher.launch(shares, self._counters)
        return self._in_flight

    def _end_expired(self) -> None:
        now = self._clock()
        for requests in (self._running, self._waiting):  # both are sorted by deadline
            for request in list(takewhile(lambda r: r.deadline <= now, requests)):
                request.finish_reason = FinishReason.DEADLINE
                self._end(request, RequestStatus.FINISHED)
                self.news.add(request)

    def _serve_running(self, *, ahead: bool) -> dict[Request, int] | None:
        """Each running request's number of tokens, and blocks for them; None if there are not enough blocks
        while planning ahead."""
        shares: dict[Request, int] = {}
        budget = self._budget([r.expected_progress()[1] for r in self._running if not r.has_ended])
        place = 0
        while place < len(self._running):  # preemption shortens the list from its end
            request = self._running[place]
            place += 1
            num_computed, num_lacking = request.expected_progress()
            if request.has_ended or not num_lacking:
                continue
            num_behind = len(self._running) - place
            num_tokens = budget.portion(num_lacking, num_behind=num_behind)
            if self._make_room(request, num_computed + num_tokens, may_preempt=not ahead):
                shares[request] = num_tokens
                budget.take(num_lacking, num_tokens)
            elif ahead:
                return None
        return shares

    def _budget(self, lacking: Sequence[int]) -> StepBudget:
        """Of a step in which those that run lack so many tokens each."""
        could_begin = islice(self._waiting, self._config.max_num_seqs - len(self._running))
        waiting = [count for count in lacking if count > 1]
        waiting += [request.num_known_tokens for request in could_begin]
        return StepBudget(self._config, num_decoding=lacking.count(1), waiting=waiting)

    def _is_long(self, num_lacking: int) -> bool:
        return num_lacking > self._config.long_prefill_token_threshold

    def _make_room(self, request: Request, num_tokens: int, *, may_preempt: bool) -> bool:
        """Blocks for the first `num_tokens` positions; False if there are none, or the request itself had to
        give way."""
        while not self._kv_cache.extend(request, num_tokens):
            if not may_preempt:
                return False
            victim = self._running[-1]
            assert len(self._running) > 1, "a request alone always fits into the KV cache"
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        assert not victim.in_flight, "the step in flight writes to its blocks"
        self._running.remove(victim)
        self._kv_cache.free(victim)
        victim.status = RequestStatus.PREEMPTED
        self._waiting.add(victim)
        self._counters.num_preemptions += 1

    def _admit_waiting(self, shares: dict[Request, int]) -> None:
        self._lacks_blocks = self._lacks_adapters = False
        if not self._waiting:
            return
        lacking = {request: request.expected_progress()[1] for request in shares}
        budget = self._budget([*lacking.values()])
        for request, num_tokens in shares.items():
            budget.take(lacking[request], num_tokens)
        places = AdapterPlaces(self._running, self._config)
        num_long = sum(self._is_long(r.num_known_tokens - r.num_computed_tokens) for r in self._running)
        num_passed = 0
        num_seats = self._config.max_num_seqs - len(self._running)
        count = num_seats and num_seats + _MAX_PASSED + places.max_passed
        for request in self._waiting.first(count, preempted_only=self._holds_new):
            if not budget.has_room_for(request.audio) or num_passed == _MAX_PASSED or self._has_no_seat:
                break
            if not places.has_one_for(request):
                self._lacks_adapters = True
                continue
            cached = self._kv_cache.find_cached(request)
            num_lacking = request.num_known_tokens - cached.num_tokens
            if self._is_long(num_lacking) and num_long >= self._config.max_long_partial_prefills:
                num_passed += 1
                continue
            num_tokens = budget.portion(num_lacking)
            if not self._kv_cache.admit(request, cached, cached.num_tokens + num_tokens):
                self._lacks_blocks = True
                break
            self._start(request)
            places.take(request)
            shares[request] = num_tokens
            budget.take(num_lacking, num_tokens, request.audio)
            num_long += self._is_long(num_lacking)

    @property
    def _has_no_seat(self) -> bool:
        return len(self._running) == self._config.max_num_seqs

    def _start(self, request: Request) -> None:
        self._waiting.remove(request)
        insort(self._running, request, key=self._rank)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
            self._counters.prefix_cache_queries += len(request.prompt_token_ids)
            self._counters.prefix_cache_hits += request.num_cached_tokens
        request.status = RequestStatus.RUNNING

    # Results

    def update(self, plan: StepPlan, outputs: Sequence[SequenceOutput]) -> None:
        """Take in what a step gave: one output for each of its sequences, in their order.

        Afterwards the requests' states are up to date, the blocks of those that ended are free, and `news`
        says who has something to report.
        """
        assert plan is self._in_flight, "only the step in flight can come back, and only once"
        self._in_flight = None
        self._num_aborted = 0
        ended = []
        for request, output in zip(plan.requests, outputs, strict=True):
            num_kept = take_in(request, output, self._counters)
            self._kv_cache.advance(request)
            if request.has_ended:
                ended.append(request)
            if (num_kept or request.has_ended) and request.status is not RequestStatus.ABORTED:
                self.news.add(request)
        if ended:
            self._running = [request for request in self._running if not request.has_ended]
            for request in ended:
                self._forget(request)
        self.news.free_held()

    # Control

    def hold(self, *, new_only: bool) -> None:
        """Begin with nobody, and unless `new_only`, run nobody, until `release`; requests may still be added.
        Who ran and was preempted counts as running."""
        self._holds_new, self._holds_all = True, not new_only

    def release(self) -> None:
        self._holds_new = self._holds_all = False

    @property
    def is_held(self) -> bool:
        return self._holds_new

    def preempt_all(self) -> None:
        """Let all requests wait, without any block; not while a step is in flight."""
        self._planned = None
        for request in reversed(self._running.copy()):
            self._preempt(request)

    def reset_prefix_cache(self) -> bool:
        """See `KVCacheManager.reset_prefix_cache`."""
        return self._kv_cache.reset_prefix_cache()

    def take_stats(self) -> CoreStats:
        """The state now; the counters start again from zero."""
        counters, self._counters = self._counters, StepCounters()
        self._gauges_taken = self._gauges()
        return CoreStats.of(self._gauges_taken, counters, self._kv_cache.take_events())

    @property
    def stats_changed(self) -> bool:
        """The state differs from what was last taken, as it does after an abort without a step."""
        return self._gauges() != self._gauges_taken

    def _gauges(self) -> Gauges:
        waiting, num_running = self._waiting, len(self._running) - self._num_aborted
        lacks_seats = num_running == self._config.max_num_seqs
        lacks_places = self._lacks_blocks or self._lacks_adapters or lacks_seats
        is_full = bool(waiting) and (lacks_places or self._holds_new)
        return Gauges(num_running, len(waiting), waiting.num_prompt_tokens, is_full, self._kv_cache.usage)

    def check(self) -> None:
        """Assert the invariants, in time linear in the number of blocks and requests; for tests."""
        waiting = list(self._waiting)
        assert len(self._running) <= self._config.max_num_seqs
        assert len(AdapterPlaces.used_by(self._running)) <= (self._config.max_loras or 0)
        assert {*self._running, *waiting} == set(self._requests.values())
        assert len(self._running) + len(waiting) == len(self._requests)
        for requests in (self._running, waiting):
            assert [*map(self._rank, requests)] == sorted(map(self._rank, requests))
        assert all(r.status is RequestStatus.RUNNING or r.in_flight for r in self._running)
        assert not any(r.block_tables or r.num_computed_tokens or r.in_flight for r in waiting)
        for request in self._requests.values():
            assert request.num_computed_tokens < request.num_known_tokens <= request.max_known_tokens
        self._kv_cache.check(self._running)
