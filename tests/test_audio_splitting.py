"""Long audio is cut where it is quiet."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from trioserve.audio.splitting import Window, most_windows, split_at_quiet

RATE = 16_000


def noise(seconds: float, *, pauses: list[float]) -> np.ndarray:
    """Loud, but for 0.5 s from each of `pauses` (seconds) on."""
    samples = np.random.default_rng(1).uniform(-0.5, 0.5, int(seconds * RATE)).astype(np.float32)
    for pause in pauses:
        samples[int(pause * RATE) : int((pause + 0.5) * RATE)] *= 0.01
    return samples


def test_windows_end_in_pauses() -> None:
    windows = list(split_at_quiet(noise(70, pauses=[12, 27, 40, 53])))
    assert [window.start / RATE for window in windows] == pytest.approx([0, 27.25, 53.25], abs=0.06)
    assert all(window.duration <= 30 for window in windows)
    assert windows[1].offset == windows[1].start / RATE


@pytest.mark.parametrize("length", [1, RATE, 30 * RATE, 30 * RATE + 1, 95 * RATE + 7])
def test_windows_are_all_of_the_audio_once(length: int) -> None:
    windows = list(split_at_quiet(np.zeros(length, np.float32)))
    assert windows[0].start == 0
    assert windows[-1].end == length
    assert all(before.end == after.start for before, after in pairwise(windows))
    assert all(0 < window.end - window.start <= 30 * RATE for window in windows)
    assert len(windows) <= most_windows(length / RATE)


def test_no_more_windows_than_foretold() -> None:
    """Each ends as early as it can."""
    earliest = [25 + 25.25 * number for number in range(8)]
    for seconds in (30, 30.5, 55, 56, 200):
        windows = list(split_at_quiet(noise(seconds, pauses=earliest)))
        assert len(windows) <= most_windows(seconds) <= len(windows) + 1
    assert most_windows(30) == 1


def test_what_fits_stays_whole() -> None:
    assert list(split_at_quiet(np.zeros(30 * RATE, np.float32))) == [Window(0, 30 * RATE)]
