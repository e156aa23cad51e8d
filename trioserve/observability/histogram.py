"""Counting in buckets, cheaply."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Histogram", "one_two_five"]


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `limit`."""
    bounds = []
    power = 1
    while power <= limit:
        bounds += [float(power * step) for step in (1, 2, 5) if power * step <= limit]
        power *= 10
    return tuple(bounds)


class Histogram:
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
        family = HistogramMetricFamily(self.name, self.text, labels=names)
        buckets = list(zip(self._labels, map(float, accumulate(self.counts)), strict=True))
        family.add_metric(values, buckets=buckets, sum_value=self.sum)
        return family
