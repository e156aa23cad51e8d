"""The engine core as one object: a scheduler and a runner, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

from trioserve.core.kv_cache import KVCacheManager
from trioserve.core.request import CoreRequest
from trioserve.core.scheduler import Scheduler
from trioserve.outputs import FinishReason
from trioserve.worker.batch import SampledToken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.core.request import Request
    from trioserve.core.scheduler import StepPlan
    from trioserve.core.stats import CoreStats
    from trioserve.worker.batch import StepBatch

__all__ = ["CoreRequest", "EngineCore", "Runner", "StepResult"]


class Runner(Protocol):
    """What computes."""

    def execute(self, batch: StepBatch) -> Sequence[SampledToken]:
        """Compute all tokens of a batch and draw the next one of each sequence that has `samples` set.

        Returns those tokens in the batch's order; sequences that do not sample have no entry. Blocks.
        """


@attrs.frozen(kw_only=True, eq=False)
class StepResult:
    """What a step gave: parallel lists with one entry per request that has something to report."""

    request_ids: Sequence[int] = ()
    token_ids: Sequence[Sequence[int]] = ()
    """Tokens not reported before: one of a request that streams, all of one that does not."""
    sampled: Sequence[Sequence[SampledToken]] = ()
    """The same tokens, with their logprobs if those were asked for."""
    finish_reasons: Sequence[FinishReason | None] = ()
    """None while the request runs."""
    stop_token_ids: Sequence[int | None] = ()
    """The request's own stop token that ended it; EOS is none."""
    num_cached_tokens: Sequence[int] = ()
    """Prompt tokens found in the prefix cache when the request was first scheduled."""

    @classmethod
    def failure(cls, request_id: int) -> StepResult:
        """Of a request that could not even be added."""
        return cls(
            request_ids=[request_id],
            token_ids=[[]],
            sampled=[[]],
            finish_reasons=[FinishReason.ERROR],
            stop_token_ids=[None],
            num_cached_tokens=[0],
        )

    @classmethod
    def of(cls, requests: Sequence[Request]) -> StepResult:
        """Takes over what these requests have not reported yet."""
        sampled = [request.take_unreported() for request in requests]
        return cls(
            request_ids=[request.request_id for request in requests],
            token_ids=[[token.token_id for token in tokens] for tokens in sampled],
            sampled=sampled,
            finish_reasons=[request.finish_reason for request in requests],
            stop_token_ids=[request.stop_token_id for request in requests],
            num_cached_tokens=[request.num_cached_tokens for request in requests],
        )


class EngineCore:
    """Runs requests, step by step:

        while core.has_work:
            plan = core.schedule()
            sampled = core.execute(plan)            # the only call that takes long
            result = core.finish(plan, sampled)

    All calls belong to one thread but `execute`, which reads only the plan and may run in another one. While
    it does, everything may be called but `schedule`.

    Errors: what the runner raises passes through `execute` and ends this object. The step can neither be
    finished nor repeated, since nobody knows what it has written to the KV cache, so the next `schedule`
    fails too. The owner treats it as the death of the engine.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler

    @classmethod
    def from_config(
        cls, runner: Runner, config: EngineConfig, model: ResolvedModel, *, num_blocks: int
    ) -> EngineCore:
        """The core for a runner that has allocated `num_blocks` blocks; enough for one `max_model_len`."""
        kv_cache = KVCacheManager(
            num_blocks,
            config.cache.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            model=config.model.model,
        )
        scheduler = Scheduler(
            config.scheduler, kv_cache, max_model_len=model.max_model_len, eos_token_ids=model.eos_token_ids
        )
        return cls(runner, scheduler)

    @property
    def has_work(self) -> bool:
        """There is a request that has neither ended nor been aborted, or a step is in flight for one."""
        return self._scheduler.has_requests

    def add(self, add: CoreRequest) -> None:
        """See `Scheduler.add`, also for what it raises."""
        self._scheduler.add(add)

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `Scheduler.abort`. Nothing is reported of these requests any more."""
        self._scheduler.abort(request_ids)

    def schedule(self) -> StepPlan | None:
        """The next step, None if there is nothing to do. Then comes `execute`, then `finish`."""
        return self._scheduler.schedule()

    def execute(self, plan: StepPlan) -> Sequence[SampledToken]:
        """Compute a step. Blocks; may run in another thread."""
        return self._runner.execute(plan.batch)

    def finish(self, plan: StepPlan, sampled: Sequence[SampledToken]) -> StepResult:
        """Take in what a step gave. Requests that do not stream are reported once, when they have ended."""
        advanced = self._scheduler.update(plan, sampled)
        return StepResult.of([request for request in advanced if request.streams or request.has_ended])

    def take_stats(self) -> CoreStats:
        """State and counters since the last call, at any time, with or without a step between."""
        return self._scheduler.take_stats()

    @property
    def stats_changed(self) -> bool:
        """`take_stats` would show another state than last time: worth sending even without a step."""
        return self._scheduler.stats_changed

    def reset_prefix_cache(self) -> bool:
        """Forget what the prefix cache holds; False, and nothing done, while any request holds a block."""
        return self._scheduler.reset_prefix_cache()
