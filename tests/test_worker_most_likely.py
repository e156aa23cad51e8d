"""The highest few of many numbers."""

from __future__ import annotations

import numpy as np
import pytest

from trioserve.worker.most_likely import highest_indices


def _values(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    values = rng.normal(size=size).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    if kind == "few":
        values[rng.random(size) < 0.999] = -np.inf
    if kind == "rising":
        values.sort()
    if kind == "equal":
        values[:] = 1.5
    return values


@pytest.mark.parametrize("kind", ["random", "ties", "few", "rising", "equal"])
@pytest.mark.parametrize("size", [1, 5, 100, 1001, 20_000])
@pytest.mark.parametrize("count", [1, 20, 64, 1024])
def test_they_come_in_falling_order_and_by_index(kind: str, size: int, count: int) -> None:
    values = _values(kind, size)
    found = highest_indices(values, count)
    in_order = sorted(range(size), key=lambda index: (-values[index], index))
    assert len(found) >= min(count, size)
    assert found.tolist() == in_order[: len(found)]
    if len(found) < size:  # all that are as high as the last one
        assert values[in_order[len(found)]] < values[found[-1]]


def test_few_more_are_found_than_wanted() -> None:
    assert len(highest_indices(_values("random", 50_000), 64)) < 100
