"""The engine core as one object: a scheduler and a runner, one step at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from trioserve.core.admission import RequestLimits
from trioserve.core.kv_cache import KVCacheManager
from trioserve.core.proposer import Proposer
from trioserve.core.scheduler import Scheduler
from trioserve.core.step_result import StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.core.launch import StepPlan
    from trioserve.core.request import CoreRequest
    from trioserve.core.stats import CoreStats
    from trioserve.worker.batch import SequenceOutput, StepBatch
    from trioserve.worker.kv_layout import KVCacheLayout

__all__ = ["EngineCore", "Runner"]


class Runner(Protocol):
    """What computes."""

    @property
    def layout(self) -> KVCacheLayout:
        """How the model's layers share out the KV cache."""
        ...

    def execute(self, batch: StepBatch) -> Sequence[SequenceOutput]:
        """Compute all tokens of a batch, and draw the next ones of each sequence that has `samples` set.

        Returns one output per sequence, in the batch's order. Blocks.
        """
        ...


class EngineCore:
    """Runs requests, step by step:

        while (plan := core.schedule()) is not None:
            # in another thread, while this one calls core.plan_ahead(), core.add(...), core.abort(...)
            outputs = core.execute(plan)
            core.finish(plan, outputs)
            result = core.take_result()

    All calls belong to one thread but `execute`, which reads only the plan and may run in another one. While
    it does, everything may be called but `schedule` and what says so.

    Errors: what the runner raises passes through `execute` and ends this object. The step can neither be
    finished nor repeated, since nobody knows what it has written to the KV cache, so the next `schedule`
    fails too. The owner treats it as the death of the engine.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler

    @classmethod
    def from_config(
        cls,
        runner: Runner,
        config: EngineConfig,
        model: ResolvedModel,
        *,
        num_blocks: int,
        max_num_seqs: int | None = None,
    ) -> EngineCore:
        """The core for a runner that has allocated `num_blocks` blocks; enough for one `max_model_len`.
        max_num_seqs: what the runner can take over them, where that is limited (`Executor.max_num_seqs`)."""
        scheduling = config.scheduler
        if max_num_seqs is not None:
            fewer = min(max_num_seqs, scheduling.max_num_seqs)
            scheduling = attrs.evolve(scheduling, max_num_seqs=fewer)
        kv_cache = KVCacheManager(
            num_blocks,
            runner.layout,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            model=config.model.model,
        )
        limits = RequestLimits(
            max_model_len=model.max_model_len, eos_token_ids=frozenset(model.eos_token_ids)
        )
        proposer = Proposer(config.speculative, jump_ahead=config.structured_outputs.jump_ahead)
        return cls(runner, Scheduler(scheduling, kv_cache, limits, proposer=proposer))

    # Requests

    @property
    def has_work(self) -> bool:
        """There is a request that has neither ended nor been aborted, or a step is in flight for one."""
        return self._scheduler.has_requests

    def add(self, new: CoreRequest) -> None:
        """See `Scheduler.add`, also for what it raises."""
        self._scheduler.add(new)

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `Scheduler.abort`. Nothing is reported of these requests any more but that they are freed."""
        self._scheduler.abort(request_ids)

    # Steps

    def schedule(self) -> StepPlan | None:
        """The next step, None if there is nothing to do. Then comes `execute`, then `finish`."""
        return self._scheduler.schedule()

    def execute(self, plan: StepPlan) -> Sequence[SequenceOutput]:
        """Compute a step. Blocks; may run in another thread."""
        return self._runner.execute(plan.batch)

    def plan_ahead(self) -> None:
        """While a step is in flight: decide what can be decided of the next one, so that `schedule` has less
        to do. Optional."""
        self._scheduler.plan_ahead()

    def finish(self, plan: StepPlan, outputs: Sequence[SequenceOutput]) -> None:
        """Take in what a step gave."""
        self._scheduler.update(plan, outputs)

    def take_result(self) -> StepResult:
        """What there is to report since the last call. Requests that do not stream are reported once, when
        they have ended."""
        news = self._scheduler.news
        return StepResult.of([r for r in news.take() if r.streams or r.has_ended], news.take_freed())

    def take_freed(self) -> StepResult:
        """Of what `take_result` gives, only the aborted requests that are freed, at any time."""
        return StepResult(freed=self._scheduler.news.take_freed())

    @property
    def has_freed(self) -> bool:
        """`take_freed` would give some."""
        return self._scheduler.news.has_freed

    @property
    def step_in_flight(self) -> bool:
        return self._scheduler.step_in_flight

    # State

    def take_stats(self) -> CoreStats:
        """State and counters since the last call, at any time, with or without a step between."""
        return self._scheduler.take_stats()

    @property
    def stats_changed(self) -> bool:
        """`take_stats` would show another state than last time: worth sending even without a step."""
        return self._scheduler.stats_changed

    @property
    def num_begun(self) -> int:
        """Requests that run, or did before they were preempted."""
        return self._scheduler.num_begun

    def hold(self, *, new_only: bool) -> None:
        """Begin with no request from now on; without `new_only`, `schedule` gives no step at all."""
        self._scheduler.hold(new_only=new_only)

    def release(self) -> None:
        """End a `hold`."""
        self._scheduler.release()

    @property
    def is_held(self) -> bool:
        return self._scheduler.is_held

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget what the prefix cache holds; False, and nothing done, while any request holds a block.

        With `preempt_running`, and no step in flight, all requests give up their blocks first, and compute
        again what they had.
        """
        if preempt_running:
            self._scheduler.preempt_all()
        return self._scheduler.reset_prefix_cache()
