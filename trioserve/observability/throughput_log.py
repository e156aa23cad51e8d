"""One line about the engine's work from time to time, while it works."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trioserve.observability.metrics import EngineMetrics, EngineTotals

__all__ = ["log_throughput"]

log = logging.getLogger("trioserve.stats")


async def log_throughput(metrics: EngineMetrics, interval: float) -> None:
    """Log every `interval` seconds in which tokens were computed; for ever, or not at all if it is 0."""
    if interval <= 0:
        return
    before = metrics.totals()
    while True:
        await trio.sleep(interval)
        now = metrics.totals()
        if now != before:
            log.info("%s: %s", metrics.model_name, _describe(before, now, interval))
        before = now


def _describe(before: EngineTotals, now: EngineTotals, interval: float) -> str:
    """Rates and shares are those of the interval, and are left out where there was nothing to share."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / interval
    generation = (now.generation_tokens - before.generation_tokens) / interval
    parts = [
        f"prompt {prompt:.1f} tok/s, generation {generation:.1f} tok/s",
        f"running {now.running}, waiting {now.waiting}, KV cache {now.kv_cache_usage:.1%}",
    ]
    if (queries := now.prefix_cache_queries - before.prefix_cache_queries) > 0:
        parts.append(f"prefix cache hits {(now.prefix_cache_hits - before.prefix_cache_hits) / queries:.1%}")
    if (drafts := now.draft_tokens - before.draft_tokens) > 0:
        parts.append(f"drafts accepted {(now.accepted_tokens - before.accepted_tokens) / drafts:.1%}")
    return ", ".join(parts)
