"""One line about the engine's work from time to time, while it works."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trioserve.observability.metrics import EngineMetrics

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
            log.info(
                "prompt %.1f tok/s, generation %.1f tok/s, running %d, waiting %d, KV cache %.1f %%",
                (now.prompt_tokens - before.prompt_tokens) / interval,
                (now.generation_tokens - before.generation_tokens) / interval,
                now.running,
                now.waiting,
                now.kv_cache_usage * 100,
            )
        before = now
