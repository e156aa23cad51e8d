"""The metrics of several engines on one page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trioserve.observability.metrics import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

__all__ = ["ServerCounts", "render_together"]


class ServerCounts(Collector):
    """What a server of several models counts before it knows which one a request is for: `model_name` is
    empty. (With one model, its `EngineMetrics` count it.)

    Recorded and rendered from one thread, as `EngineMetrics`.
    """

    def __init__(self) -> None:
        self._refused: dict[str, int] = {}
        self._expired = 0
        self._num_websockets = 0

    def record_refusal(self, reason: str) -> None:
        """As that of `EngineMetrics`."""
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def record_expiry(self) -> None:
        """As that of `EngineMetrics`."""
        self._expired += 1

    def record_websocket(self, change: int) -> None:
        """As that of `EngineMetrics`."""
        self._num_websockets += change

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        labels = ("model_name", "engine")
        expired = CounterMetricFamily(f"{PREFIX}requests_expired", "", labels=labels)
        expired.add_metric(("", ""), self._expired)
        yield expired
        websockets = GaugeMetricFamily(f"{PREFIX}websockets_open", "", labels=labels)
        websockets.add_metric(("", ""), self._num_websockets)
        yield websockets
        refused = CounterMetricFamily(f"{PREFIX}requests_refused", "", labels=(*labels, "reason"))
        for reason, count in self._refused.items():
            refused.add_metric(("", "", reason), count)
        yield refused


def render_together(collectors: Sequence[Collector]) -> bytes:
    """As Prometheus text, in which each name must be told once: with the samples of all, and the words of the
    first."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Together(collectors))
    return generate_latest(registry)


@attrs.frozen(eq=False)
class _Together(Collector):
    _collectors: Sequence[Collector]

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():  # made for this call, so that samples can be added
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return families.values()
