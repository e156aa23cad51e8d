"""What the core reports about itself."""

from __future__ import annotations

import attrs

__all__ = ["CoreStats", "StepCounters"]


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
