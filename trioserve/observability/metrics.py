"""The engine's Prometheus metrics.

The counting side runs on every step and every token, so it is plain Python: an attribute or a list item is
increased, and `prometheus_client` only sees the numbers when somebody scrapes. (Its own `Histogram.observe`
takes a lock and walks the buckets one by one; with 32 requests in a step that costs four times as much.)

Names are vLLM's with the prefix `trioserve:`. Counters are exposed with the suffix `_total`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trioserve.observability.histogram import Histogram, one_two_five
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.metrics_core import Metric

__all__ = ["PREFIX", "EngineMetrics", "EngineTotals", "StepStats"]

PREFIX = "trioserve:"
"""Of all names."""

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
_ABORT_TO_FREE = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names, by sleep level. (At level 1, ours keeps the weights where they are.)"""
_ITERATION = tuple(float(bound) for bound in (1, *(2**power for power in range(3, 15))))


class CacheChanges(Protocol):
    """See `trioserve.core.stats.CacheEvents`."""

    @property
    def num_stored(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    @property
    def num_resets(self) -> int: ...


class StepStats(Protocol):
    """What `EngineMetrics.record_stats` reads: an engine core's state after a step.

    The first five are levels; the others are what was added since the stats before.
    """

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...
    @property
    def sleep_level(self) -> int: ...
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
    @property
    def num_drafts(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...
    @property
    def accepted_per_position(self) -> Sequence[int]: ...
    @property
    def cache_events(self) -> CacheChanges: ...


@attrs.define(eq=False)
class _Levels:
    up: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_cache_usage: float = 0.0
    sleep_level: int = 0


@attrs.define(eq=False)
class _Counters:
    """Only ever grow."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    blocks_stored: int = 0
    blocks_evicted: int = 0
    cache_resets: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = attrs.Factory(list)
    expired: int = 0
    audio_seconds: float = 0.0
    finished: list[int] = attrs.Factory(lambda: [0] * (max(FinishReason) + 1))
    """By `FinishReason`."""
    deaths: int = 0
    restarts: int = 0
    refused: dict[str, int] = attrs.Factory(lambda: {"queue_full": 0, "queued_tokens": 0})
    """By reason."""


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
    prefix_cache_queries: int
    """Prompt tokens looked up, and found."""
    prefix_cache_hits: int
    draft_tokens: int
    """Guessed, and kept."""
    accepted_tokens: int


class EngineMetrics(Collector):
    """Counters, gauges and histograms of one engine, in a registry of its own.

    Recorded and rendered from one thread (the event loop's); nothing here waits or fails.
    """

    content_type = CONTENT_TYPE_LATEST
    """Of what `render` returns."""

    def __init__(self, model_name: str, max_model_len: int, *, engine: str = "0") -> None:
        self.model_name = model_name
        self._label_names = ("model_name", "engine")
        self._label_values = (model_name, engine)
        self._levels = _Levels()
        self._num_websockets = 0
        self._counters = _Counters()
        lengths = one_two_five(max_model_len)
        self._first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _TIME_TO_FIRST_TOKEN,
        )
        self._inter_token = Histogram(
            PREFIX + "inter_token_latency_seconds", "Between two tokens of a request.", _INTER_TOKEN
        )
        self._request_time = Histogram(
            PREFIX + "e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST
        )
        self._request_prompt = Histogram(
            PREFIX + "request_prompt_tokens", "Prompt tokens per request.", lengths
        )
        self._request_generation = Histogram(
            PREFIX + "request_generation_tokens", "Generated tokens per request.", lengths
        )
        self._iteration = Histogram(
            PREFIX + "iteration_tokens_total", "Tokens (prompt and generated) per engine step.", _ITERATION
        )
        self._abort_to_free = Histogram(
            PREFIX + "abort_to_free_seconds",
            "From the abort of a sequence to the news that its memory is free.",
            _ABORT_TO_FREE,
        )
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def record_stats(self, stats: StepStats) -> None:
        """An engine core's state after a step."""
        levels, counters = self._levels, self._counters
        levels.running = stats.num_running
        levels.waiting = stats.num_waiting
        levels.queued_tokens = stats.num_queued_tokens
        levels.kv_cache_usage = stats.kv_cache_usage
        levels.sleep_level = stats.sleep_level
        counters.preemptions += stats.num_preemptions
        counters.prefix_cache_queries += stats.prefix_cache_queries
        counters.prefix_cache_hits += stats.prefix_cache_hits
        counters.prompt_tokens += stats.num_prompt_tokens
        counters.generation_tokens += stats.num_generation_tokens
        counters.blocks_stored += stats.cache_events.num_stored
        counters.blocks_evicted += stats.cache_events.num_evicted
        counters.cache_resets += stats.cache_events.num_resets
        if stats.num_drafts:
            self._record_drafts(stats)
        if num_tokens := stats.num_prompt_tokens + stats.num_generation_tokens:
            self._iteration.observe(num_tokens)

    def _record_drafts(self, stats: StepStats) -> None:
        counters, accepted = self._counters, self._counters.accepted_per_position
        counters.drafts += stats.num_drafts
        counters.draft_tokens += stats.num_draft_tokens
        counters.accepted_tokens += stats.num_accepted_tokens
        accepted += [0] * (len(stats.accepted_per_position) - len(accepted))
        for position, number in enumerate(stats.accepted_per_position):
            accepted[position] += number

    def record_ready(self, *, is_restart: bool) -> None:
        """An engine core serves from now on: the first one, or one in the place of another that died."""
        self._levels = _Levels(up=1)
        self._counters.restarts += is_restart

    def record_death(self) -> None:
        """The engine core is gone, and all that it held; or it could not be restarted."""
        self._levels = _Levels()
        self._counters.deaths += 1

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

    def record_refusal(self, reason: str) -> None:
        """A request was turned away at the door, for lack of room: a word of a fixed list, such as
        queue_full."""
        refused = self._counters.refused
        refused[reason] = refused.get(reason, 0) + 1

    def record_websocket(self, change: int) -> None:
        """A WebSocket was opened (1) or has ended (-1)."""
        self._num_websockets += change

    def record_audio(self, seconds: float) -> None:
        """A transcription has begun, of so much audio."""
        self._counters.audio_seconds += seconds

    def record_expiry(self) -> None:
        """A request ran out of time: its deadline has passed, or the server's shutdown has ended it."""
        self._counters.expired += 1

    def record_abort_to_free(self, seconds: float) -> None:
        """The engine core has freed a sequence, so long after its abort was sent."""
        self._abort_to_free.observe(seconds)

    def totals(self) -> EngineTotals:
        levels, counters = self._levels, self._counters
        return EngineTotals(
            running=levels.running,
            waiting=levels.waiting,
            kv_cache_usage=levels.kv_cache_usage,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
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
            self._abort_to_free,
        ):
            yield histogram.collect(self._label_names, self._label_values)

    def _collect_gauges(self) -> Iterable[Metric]:
        levels = self._levels
        for name, text, value in (
            ("engine_up", "1 while an engine core serves, 0 while there is none.", levels.up),
            ("num_requests_running", "Requests in the running batch.", levels.running),
            ("num_requests_waiting", "Requests that wait to be scheduled.", levels.waiting),
            ("num_prompt_tokens_waiting", "Prompt tokens of those that wait.", levels.queued_tokens),
            ("websockets_open", "WebSockets whose handlers run.", self._num_websockets),
            ("kv_cache_usage_perc", "KV blocks in use, from 0 to 1.", levels.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=self._label_names)
            gauge.add_metric(self._label_values, value)
            yield gauge
        states = GaugeMetricFamily(
            PREFIX + "engine_sleep_state",
            "1 for the state that the engine is in, 0 for the others.",
            labels=(*self._label_names, "sleep_state"),
        )
        for level, state in enumerate(_SLEEP_STATES):
            states.add_metric((*self._label_values, state), int(level == levels.sleep_level))
        yield states

    def _collect_counters(self) -> Iterable[Metric]:
        counters = self._counters
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens computed.", counters.prompt_tokens),
            ("generation_tokens", "Tokens generated.", counters.generation_tokens),
            ("engine_deaths", "Engine cores that died or could not be restarted.", counters.deaths),
            ("engine_restarts", "Engine cores in the place of one that died.", counters.restarts),
            ("num_preemptions", "Requests put back to be computed again.", counters.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", counters.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found.", counters.prefix_cache_hits),
            ("kv_cache_blocks_stored", "Blocks that the prefix cache learned.", counters.blocks_stored),
            ("kv_cache_blocks_evicted", "Blocks that it gave up for others.", counters.blocks_evicted),
            ("kv_cache_resets", "Times that it forgot everything.", counters.cache_resets),
            ("audio_seconds", "Seconds of audio to transcribe.", counters.audio_seconds),
            ("requests_expired", "Requests that ran out of time.", counters.expired),
            ("spec_decode_num_drafts", "Times that a sequence had drafts.", counters.drafts),
            ("spec_decode_num_draft_tokens", "Tokens guessed.", counters.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Guesses that were right.", counters.accepted_tokens),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=self._label_names)
            counter.add_metric(self._label_values, value)
            yield counter
        yield self._collect_labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Guesses that were right, by their place among those of a step.",
            "position",
            {str(position): number for position, number in enumerate(counters.accepted_per_position)},
        )
        yield self._collect_labelled(
            "request_success",
            "Requests ended.",
            "finished_reason",
            {str(reason): counters.finished[reason] for reason in FinishReason},
        )
        yield self._collect_labelled(
            "requests_refused",
            "Requests turned away because there was no room.",
            "reason",
            counters.refused,
        )

    def _collect_labelled(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        counter = CounterMetricFamily(PREFIX + name, text, labels=(*self._label_names, label))
        for key, value in values.items():
            counter.add_metric((*self._label_values, key), value)
        return counter
