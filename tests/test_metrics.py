"""EngineMetrics: what is recorded is what a scrape shows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import trio
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from trioserve.core.stats import CacheEvents
from trioserve.observability.metrics import EngineMetrics
from trioserve.observability.throughput_log import log_throughput
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    import pytest
    from prometheus_client.samples import Sample
    from trio.testing import MockClock

_NO_EVENTS = CacheEvents()
_LABELS = ("le", "finished_reason", "position", "sleep_state", "reason")


@attrs.frozen(kw_only=True)
class Stats:
    """A step's statistics, as an engine core reports them."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: Sequence[int] = ()
    cache_events: CacheEvents = _NO_EVENTS
    sleep_level: int = 0


def scrape(metrics: EngineMetrics) -> dict[str, float]:
    """Sample name (with the label that tells it apart) -> value."""
    return {
        _key(sample): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def _key(sample: Sample) -> str:
    assert sample.labels["model_name"] == "small"
    assert sample.labels["engine"] == "0"
    apart = next((sample.labels[name] for name in _LABELS if name in sample.labels), None)
    return sample.name + (f"[{apart}]" if apart else "")


def new_metrics(max_model_len: int = 100) -> EngineMetrics:
    return EngineMetrics("small", max_model_len)


def test_levels_are_the_last_ones_and_counters_add_up() -> None:
    metrics = new_metrics()
    for running, waiting in ((3, 2), (1, 0)):
        metrics.record_stats(
            Stats(
                num_running=running,
                num_waiting=waiting,
                num_queued_tokens=10 * waiting,
                kv_cache_usage=running / 10,
                num_preemptions=1,
                prefix_cache_queries=20,
                prefix_cache_hits=16,
                num_prompt_tokens=4,
                num_generation_tokens=running,
            )
        )
    values = scrape(metrics)
    assert values["trioserve:num_requests_running"] == 1
    assert values["trioserve:num_requests_waiting"] == 0
    assert values["trioserve:kv_cache_usage_perc"] == 0.1
    assert values["trioserve:num_preemptions_total"] == 2
    assert values["trioserve:prefix_cache_queries_total"] == 40
    assert values["trioserve:prefix_cache_hits_total"] == 32
    assert values["trioserve:prompt_tokens_total"] == 8
    assert values["trioserve:generation_tokens_total"] == 4
    totals = metrics.totals()
    assert (totals.running, totals.waiting, totals.prompt_tokens, totals.generation_tokens) == (1, 0, 8, 4)


def test_tokens_of_a_step_are_prompt_and_generated_ones() -> None:
    metrics = new_metrics()
    metrics.record_stats(Stats(num_prompt_tokens=10, num_generation_tokens=7))
    metrics.record_stats(Stats(num_generation_tokens=1))
    metrics.record_stats(Stats())  # nothing was computed: no step to speak of
    values = scrape(metrics)
    assert values["trioserve:iteration_tokens_total_count"] == 2
    assert values["trioserve:iteration_tokens_total_sum"] == 18
    assert values["trioserve:iteration_tokens_total_bucket[1.0]"] == 1
    assert values["trioserve:iteration_tokens_total_bucket[32.0]"] == 2


def test_every_finish_reason_has_its_counter_from_the_start() -> None:
    metrics = new_metrics()
    metrics.record_finish(FinishReason.LENGTH, 5, 16, 2.0)
    metrics.record_finish(FinishReason.ABORT, 5, 3, 1.0)
    values = scrape(metrics)
    expected_counts = {"stop": 0, "length": 1, "abort": 1, "error": 0, "repetition": 0, "deadline": 0}
    for reason, expected in expected_counts.items():
        assert values[f"trioserve:request_success_total[{reason}]"] == expected
    assert values["trioserve:request_prompt_tokens_sum"] == 10
    assert values["trioserve:request_generation_tokens_sum"] == 19
    assert values["trioserve:e2e_request_latency_seconds_sum"] == 3.0
    assert values["trioserve:e2e_request_latency_seconds_bucket[1.0]"] == 1


def test_buckets_are_prometheus_own() -> None:
    """Values on, between and beyond the bounds fall where prometheus_client's histogram puts them."""
    observed = [0.0, 0.001, 0.0011, 0.25, 0.3, 2560.0, 5000.0]
    metrics = new_metrics()
    for seconds in observed:
        metrics.record_first_token(seconds)
    prefix = "trioserve:time_to_first_token_seconds_bucket["
    ours = {
        float(name.removeprefix(prefix).removesuffix("]")): value
        for name, value in scrape(metrics).items()
        if name.startswith(prefix)
    }
    registry = CollectorRegistry()
    theirs = Histogram("theirs", "", registry=registry, buckets=sorted(ours))
    for seconds in observed:
        theirs.observe(seconds)
    for bound, value in ours.items():
        label = "+Inf" if bound == float("inf") else str(bound)
        assert value == registry.get_sample_value("theirs_bucket", {"le": label})


def test_an_inter_token_time_counts_for_all_its_tokens() -> None:
    metrics = new_metrics()
    metrics.record_inter_token(0.02, 3)
    values = scrape(metrics)
    assert values["trioserve:inter_token_latency_seconds_count"] == 3
    assert round(values["trioserve:inter_token_latency_seconds_sum"], 6) == 0.06


def test_length_buckets_end_with_the_context() -> None:
    names = scrape(new_metrics(max_model_len=120))
    bounds = [name for name in names if name.startswith("trioserve:request_prompt_tokens_bucket[")]
    assert [bound.split("[")[1] for bound in bounds] == [
        "1.0]", "2.0]", "5.0]", "10.0]", "20.0]", "50.0]", "100.0]", "+Inf]",
    ]  # fmt: skip


def test_a_dead_engine_runs_nothing() -> None:
    metrics = new_metrics()
    metrics.record_stats(
        Stats(num_running=3, num_waiting=2, num_queued_tokens=9, kv_cache_usage=0.5, num_generation_tokens=7)
    )
    metrics.record_death()
    values = scrape(metrics)
    assert values["trioserve:num_requests_running"] == values["trioserve:kv_cache_usage_perc"] == 0
    assert values["trioserve:num_prompt_tokens_waiting"] == 0
    assert values["trioserve:generation_tokens_total"] == 7


def test_refusals_are_counted_by_reason_from_the_start() -> None:
    metrics = new_metrics()
    assert scrape(metrics)["trioserve:requests_refused_total[queue_full]"] == 0
    assert scrape(metrics)["trioserve:requests_refused_total[queued_tokens]"] == 0
    for reason in ("queue_full", "connections", "queue_full"):
        metrics.record_refusal(reason)
    values = scrape(metrics)
    assert values["trioserve:requests_refused_total[queue_full]"] == 2
    assert values["trioserve:requests_refused_total[connections]"] == 1


def test_the_time_from_abort_to_free_is_a_histogram() -> None:
    metrics = new_metrics()
    for seconds in (0.0004, 0.002, 0.002, 120.0):
        metrics.record_abort_to_free(seconds)
    values = scrape(metrics)
    assert values["trioserve:abort_to_free_seconds_count"] == 4
    assert values["trioserve:abort_to_free_seconds_bucket[0.0005]"] == 1
    assert values["trioserve:abort_to_free_seconds_bucket[0.0025]"] == 3
    assert values["trioserve:abort_to_free_seconds_bucket[60.0]"] == 3


def test_two_engines_in_one_process_do_not_meet() -> None:
    first, second = new_metrics(), new_metrics()
    first.record_stats(Stats(num_generation_tokens=5))
    assert scrape(second)["trioserve:generation_tokens_total"] == 0


def test_what_drafts_and_the_prefix_cache_do_adds_up() -> None:
    metrics = new_metrics()
    events = CacheEvents(num_stored=3, num_evicted=2, num_resets=1)
    for accepted in ([2, 1], [1, 1, 1], []):
        metrics.record_stats(
            Stats(
                num_drafts=2 if accepted else 0,
                num_draft_tokens=8 if accepted else 0,
                num_accepted_tokens=sum(accepted),
                accepted_per_position=accepted,
                cache_events=events,
            )
        )
    values = scrape(metrics)
    assert values["trioserve:spec_decode_num_drafts_total"] == 4
    assert values["trioserve:spec_decode_num_draft_tokens_total"] == 16
    assert values["trioserve:spec_decode_num_accepted_tokens_total"] == 6
    per_position = "trioserve:spec_decode_num_accepted_tokens_per_pos_total"
    assert [values[f"{per_position}[{position}]"] for position in range(3)] == [3, 2, 1]
    assert f"{per_position}[3]" not in values
    assert values["trioserve:kv_cache_blocks_stored_total"] == 9
    assert values["trioserve:kv_cache_blocks_evicted_total"] == 6
    assert values["trioserve:kv_cache_resets_total"] == 3


def test_exactly_one_sleep_state_is_on() -> None:
    metrics = new_metrics()
    for level in (0, 1, 2, 0):
        metrics.record_stats(Stats(sleep_level=level))
        values = scrape(metrics)
        states = [
            values[f"trioserve:engine_sleep_state[{state}]"]
            for state in ("awake", "weights_offloaded", "discard_all")
        ]
        assert states == [float(number == level) for number in range(3)]


async def test_the_log_has_the_rates_of_its_interval_and_only_what_there_was(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    metrics = new_metrics()
    metrics.record_stats(Stats(num_prompt_tokens=1000, prefix_cache_queries=1000, prefix_cache_hits=1000))
    with caplog.at_level(logging.INFO, "trioserve.stats"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log_throughput, metrics, 10)
            await trio.sleep(5)
            metrics.record_stats(
                Stats(
                    num_running=2,
                    kv_cache_usage=0.5,
                    num_prompt_tokens=100,
                    num_generation_tokens=20,
                    prefix_cache_queries=200,
                    prefix_cache_hits=50,
                    num_drafts=1,
                    num_draft_tokens=4,
                    num_accepted_tokens=3,
                    accepted_per_position=[1, 1, 1],
                )
            )
            await trio.sleep(10)
            metrics.record_stats(Stats(num_generation_tokens=10))
            await trio.sleep(20)  # nothing happens: nothing is said
            nursery.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "small: prompt 10.0 tok/s, generation 2.0 tok/s, running 2, waiting 0, KV cache 50.0%, "
        "prefix cache hits 25.0%, drafts accepted 75.0%",
        "small: prompt 0.0 tok/s, generation 1.0 tok/s, running 0, waiting 0, KV cache 0.0%",
    ]
