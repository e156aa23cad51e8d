"""What the core reports about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import attrs

__all__ = ["CacheEvents", "CoreStats", "Gauges", "StepCounters"]


@attrs.frozen(kw_only=True)
class CacheEvents:
    """What became of the prefix cache's contents since the events before."""

    num_stored: int = 0
    """Blocks that can be found from now on."""
    num_evicted: int = 0
    """Blocks that were given out for new content."""
    num_resets: int = 0
    """Times that everything was forgotten."""


class Gauges(NamedTuple):
    """The scheduler's state; see `CoreStats`."""

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    is_full: bool
    kv_cache_usage: float


@attrs.define
class StepCounters:
    """What has happened since the counters were last taken."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up, at a request's first start only: later it would find blocks of its own."""
    prefix_cache_hits: int = 0
    """Prompt tokens found, out of those."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed; those of preempted requests again."""
    num_generation_tokens: int = 0
    """Tokens drawn, whether they have been reported yet or not."""
    num_drafts: int = 0
    """Times that a sequence got drafts to check."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that were kept."""
    accepted_per_position: list[int] = attrs.field(factory=list)
    """Times that at least i + 1 drafts of a sequence were kept."""


@attrs.frozen(kw_only=True)
class CoreStats:
    """The core's state now, and its counters since the stats before."""

    num_running: int
    """Without those that were aborted while a step computes them; their blocks count until it is back."""
    num_waiting: int
    kv_cache_usage: float
    """0 to 1; blocks that only the prefix cache keeps are free."""
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: Sequence[int] = ()
    cache_events: CacheEvents = CacheEvents()
    sleep_level: int = 0
    """0: awake; 1: the KV cache is gone; 2: the weights too."""
    num_queued_tokens: int = 0
    """Prompt tokens of those that wait."""
    is_full: bool = False
    """Some wait for a seat, for blocks or for the end of a pause; False if only for their share of a step."""
    num_received: int = 0
    """Sequences that have come over this connection so far, whatever became of them."""

    @classmethod
    def of(cls, gauges: Gauges, counters: StepCounters, cache_events: CacheEvents) -> Self:
        counted = attrs.asdict(counters, recurse=False)
        return cls(**gauges._asdict(), **counted, cache_events=cache_events)
