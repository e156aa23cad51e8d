"""The engine's Prometheus metrics.

The counting side runs on every step and every token, so it is plain Python: an attribute or a list item is
increased, and `prometheus_client` only sees the numbers when somebody scrapes. (Its own `Histogram.observe`
takes a lock and walks the buckets one by one; with 32 requests in a step that costs four times as much.)

Names are vLLM's with the prefix `trioserve:`. Counters are exposed with the suffix `_total`.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.metrics_core import Metric

__all__ = ["EngineMetrics", "EngineTotals", "StepStats"]

_PREFIX = "trioserve:"

_TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION = tuple(float(bound) for bound in (1, *(2**power for power in range(3, 15))))


class StepStats(Protocol):
    """What `EngineMetrics.record_stats` reads: an engine core's state after a step.

    The first three are levels; the others are what was added since the stats before.
    """

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prefix_cache_queries(self) -> int: ...
    @property
    def prefix_cache_hits(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_generation_tokens(self) -> int: ...


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `limit`."""
    bounds = []
    power = 1
    while power <= limit:
        bounds += [float(power * step) for step in (1, 2, 5) if power * step <= limit]
        power *= 10
    return tuple(bounds)


class _Histogram:
    """Counts per bucket: `counts[i]` is of values in (bounds[i-1], bounds[i]], the last of those above."""

    __slots__ = ("_labels", "bounds", "counts", "name", "sum", "text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._labels = [*map(floatToGoString, bounds), "+Inf"]

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def collect(self, names: Sequence[str], values: Sequence[str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(_PREFIX + self.name, self.text, labels=names)
        buckets = list(zip(self._labels, map(float, accumulate(self.counts)), strict=True))
        family.add_metric(values, buckets=buckets, sum_value=self.sum)
        return family


@attrs.define(eq=False)
class _Levels:
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0


@attrs.define(eq=False)
class _Counters:
    """Only ever grow."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: list[int] = attrs.Factory(lambda: [0] * (max(FinishReason) + 1))
    """By `FinishReason`."""


@attrs.frozen(kw_only=True)
class EngineTotals:
    """The engine's levels now, and its counters since the start."""

    running: int
    waiting: int
    kv_cache_usage: float
    """From 0 to 1."""
    prompt_tokens: int
    generation_tokens: int
    preemptions: int


class EngineMetrics(Collector):
    """Counters, gauges and histograms of one engine, in a registry of its own.

    Recorded and rendered from one thread (the event loop's); nothing here waits or fails.
    """

    content_type = CONTENT_TYPE_LATEST
    """Of what `render` returns."""

    def __init__(self, model_name: str, max_model_len: int, *, engine: str = "0") -> None:
        self._label_names = ("model_name", "engine")
        self._label_values = (model_name, engine)
        self._levels = _Levels()
        self._counters = _Counters()
        lengths = _one_two_five(max_model_len)
        self._first_token = _Histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _TIME_TO_FIRST_TOKEN,
        )
        self._inter_token = _Histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _INTER_TOKEN
        )
        self._request_time = _Histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST
        )
        self._request_prompt = _Histogram("request_prompt_tokens", "Prompt tokens per request.", lengths)
        self._request_generation = _Histogram(
            "request_generation_tokens", "Generated tokens per request.", lengths
        )
        self._iteration = _Histogram(
            "iteration_tokens_total", "Tokens (prompt and generated) per engine step.", _ITERATION
        )
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def record_stats(self, stats: StepStats) -> None:
        """An engine core's state after a step."""
        levels, counters = self._levels, self._counters
        levels.running = stats.num_running
        levels.waiting = stats.num_waiting
        levels.kv_cache_usage = stats.kv_cache_usage
        counters.preemptions += stats.num_preemptions
        counters.prefix_cache_queries += stats.prefix_cache_queries
        counters.prefix_cache_hits += stats.prefix_cache_hits
        counters.prompt_tokens += stats.num_prompt_tokens
        counters.generation_tokens += stats.num_generation_tokens
        if num_tokens := stats.num_prompt_tokens + stats.num_generation_tokens:
            self._iteration.observe(num_tokens)

    def record_death(self) -> None:
        """The engine core is gone, and all that it held."""
        self._levels = _Levels()

    def record_first_token(self, seconds: float) -> None:
        """A request's first token came this long after its arrival."""
        self._first_token.observe(seconds)

    def record_inter_token(self, seconds: float, count: int) -> None:
        """`count` more tokens of a request, `seconds` apart each."""
        self._inter_token.observe(seconds, count)

    def record_finish(
        self, reason: FinishReason, num_prompt_tokens: int, num_generation_tokens: int, seconds: float
    ) -> None:
        """A request ended, `seconds` after its arrival."""
        self._counters.finished[reason] += 1
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generation.observe(num_generation_tokens)
        self._request_time.observe(seconds)

    def totals(self) -> EngineTotals:
        return EngineTotals(
            running=self._levels.running,
            waiting=self._levels.waiting,
            kv_cache_usage=self._levels.kv_cache_usage,
            prompt_tokens=self._counters.prompt_tokens,
            generation_tokens=self._counters.generation_tokens,
            preemptions=self._counters.preemptions,
        )

    def render(self) -> bytes:
        """Everything as Prometheus text, of the type `content_type`."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        yield from self._collect_gauges()
        yield from self._collect_counters()
        for histogram in (
            self._first_token,
            self._inter_token,
            self._request_time,
            self._request_prompt,
            self._request_generation,
            self._iteration,
        ):
            yield histogram.collect(self._label_names, self._label_values)

    def _collect_gauges(self) -> Iterable[Metric]:
        levels = self._levels
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", levels.running),
            ("num_requests_waiting", "Requests that wait to be scheduled.", levels.waiting),
            ("kv_cache_usage_perc", "KV blocks in use, from 0 to 1.", levels.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=self._label_names)
            gauge.add_metric(self._label_values, value)
            yield gauge

    def _collect_counters(self) -> Iterable[Metric]:
        counters = self._counters
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens computed.", counters.prompt_tokens),
            ("generation_tokens", "Tokens generated.", counters.generation_tokens),
            ("num_preemptions", "Requests put back to be computed again.", counters.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", counters.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found.", counters.prefix_cache_hits),
        ):
            counter = CounterMetricFamily(_PREFIX + name, text, labels=self._label_names)
            counter.add_metric(self._label_values, value)
            yield counter
        success = CounterMetricFamily(
            _PREFIX + "request_success", "Requests ended.", labels=(*self._label_names, "finished_reason")
        )
        for reason in FinishReason:
            success.add_metric((*self._label_values, str(reason)), counters.finished[reason])
        yield success
