"""Audio as it comes: samples of any rate, and windows that end where nothing is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.audio.live import LiveWindows, Pcm16Decoder
from trioserve.audio.turns import TurnDetector, TurnEnd, TurnStart

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATE = 16_000


def sound(*parts: float, loud: float = 0.5) -> NDArray[np.float32]:
    """Seconds of noise, of silence, of noise, ..."""
    noise = np.random.default_rng(0)
    pieces = [
        noise.uniform(-loud, loud, round(part * RATE)) if n % 2 == 0 else np.zeros(round(part * RATE))
        for n, part in enumerate(parts)
    ]
    return np.concatenate(pieces).astype(np.float32)


def windows_of(samples: NDArray[np.float32], step: int = 1600) -> list[NDArray[np.float32]]:
    windows, live = [], LiveWindows()
    for start in range(0, len(samples), step):
        windows += live.push(samples[start : start + step])
        assert live.seconds <= 30
    return [*windows, *live.finish()]


def lengths(samples: NDArray[np.float32], step: int = 1600) -> list[float]:
    return [len(window) / RATE for window in windows_of(samples, step)]


@pytest.mark.parametrize("step", [700, 1600, 50_000, 10_000_000])
def test_a_window_ends_in_a_pause(step: int) -> None:
    [first, second] = windows_of(sound(3.0, 0.6, 2.0, 0.6, 1.0), step)
    assert len(first) + len(second) == round(7.2 * RATE)
    assert len(first) / RATE == pytest.approx(5.9, abs=0.15)  # not in the first one, which is too early
    assert abs(second[:1600]).max() == 0


def test_the_longer_a_window_the_shorter_a_pause_will_do() -> None:
    assert lengths(sound(6.0, 0.35, 6.0)) == [12.35]
    assert lengths(sound(9.0, 0.35, 6.0))[0] == pytest.approx(9.2, abs=0.1)
    assert lengths(sound(16.0, 0.2, 6.0))[0] == pytest.approx(16.1, abs=0.1)


def test_who_makes_no_pause_is_cut_where_it_is_quietest() -> None:
    samples = sound(40.0)
    samples[round(28.7 * RATE) : round(28.8 * RATE)] *= 0.5
    first, second = lengths(samples)
    assert first == pytest.approx(28.75, abs=0.05)
    assert first + second == pytest.approx(40.0)


def test_silence_is_left_out() -> None:
    assert lengths(sound(0, 100.0)) == []
    assert sum(lengths(sound(0, 60.0, 2.0, 60.0))) < 10
    assert lengths(sound(5.0, loud=1e-3)) == []


def test_pauses_of_a_noisy_room_are_found() -> None:
    samples = sound(5.0, 0.8, 5.0)
    samples += np.random.default_rng(1).uniform(-0.02, 0.02, len(samples)).astype(np.float32)
    assert lengths(samples)[0] == pytest.approx(5.3, abs=0.2)


def test_a_rest_that_is_nothing() -> None:
    assert lengths(sound(0.09)) == []
    assert lengths(sound(0.1)) == [0.1]
    assert lengths(np.empty(0, np.float32)) == []


def test_what_is_forgotten_does_not_come() -> None:
    live = LiveWindows()
    assert not list(live.push(sound(2.0)))
    live.clear()
    assert not list(live.finish())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0, 12), max_size=8),
    st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
)
def test_nothing_that_is_loud_is_lost_or_twice(parts: list[float], steps: list[int]) -> None:
    samples = sound(*parts, 0.2)
    marked = np.arange(1, len(samples) + 1, dtype=np.float32) / np.float32(2**24)  # each is another one
    samples = np.where(samples == 0, 0, np.sign(samples) * (0.5 + marked)).astype(np.float32)
    windows, live, start = [], LiveWindows(), 0
    for step in [*steps, len(samples)]:
        windows += live.push(samples[start : start + step])
        start += step
    windows += live.finish()
    heard = np.concatenate([np.empty(0, np.float32), *windows])
    loud = samples[samples != 0]
    if loud.size:
        assert np.array_equal(heard[heard != 0][: loud.size], loud)
    assert all(len(window) <= 30 * RATE for window in windows)


@pytest.mark.parametrize("rate", [8000, 16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("step", [2, 960, 10**6])
def test_samples_of_any_rate(rate: int, step: int) -> None:
    """A tone, as its formula has it at 16 kHz."""
    seconds = 0.25
    tone = np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    data = np.round(tone * 20_000).astype("<i2").tobytes()
    decoder = Pcm16Decoder(rate)
    parts = [decoder.decode(data[start : start + step]) for start in range(0, len(data), step)]
    samples = np.concatenate([*parts, decoder.finish()])
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(seconds * RATE, abs=2)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(samples)) / RATE) * 20_000 / 2**15
    assert abs(samples - expected)[100:-100].max() < 1e-3


def test_half_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        Pcm16Decoder(RATE).decode(b"\0\0\0")


def turns_of(samples: NDArray[np.float32], step: int, **options: float) -> list[tuple[float, float]]:
    """(where it begins, where it ends) of each turn, in seconds; what is let through must be that."""
    detector = TurnDetector(**({"threshold": 0.5, "padding": 0.3, "silence": 0.5} | options))
    starts, ends, passed = [], [], []
    for start in range(0, len(samples), step):
        for part in detector.push(samples[start : start + step]):
            match part:
                case TurnStart(at):
                    starts.append(at)
                case TurnEnd(at):
                    ends.append(at)
                    assert np.array_equal(np.concatenate(passed), samples[starts[-1] : at])
                    passed.clear()
                case _:
                    passed.append(part)
    rest = np.concatenate([*passed, detector.finish()])
    if len(starts) > len(ends):
        ends.append(starts[-1] + len(rest))
    return [(start / RATE, end / RATE) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("step", [100, 1600, 10**7])
def test_turns(step: int) -> None:
    samples = sound(0, 2.0, 1.0, 0.3, 1.0, 0.6, 0.04, 2.0, 0.5)
    turns = turns_of(samples, step)
    # A pause of 0.3 s ends none, and a click of 0.04 s is none.
    assert [time for turn in turns for time in turn] == pytest.approx([1.7, 4.8, 6.64, 7.44])


def test_a_turn_that_goes_on() -> None:
    assert turns_of(sound(0, 1.0, 1.0), 1600)[0] == pytest.approx((0.7, 2.0))


def test_a_turn_needs_to_be_loud() -> None:
    assert turns_of(sound(0, 1.0, 1.0, loud=0.015), 1600) == []
    assert len(turns_of(sound(0, 1.0, 1.0, loud=0.015), 1600, threshold=0.1)) == 1


def test_a_room_may_be_noisy() -> None:
    samples = sound(0, 2.0, 1.0, 2.0, 1.0, 2.0)
    samples += np.random.default_rng(1).normal(0, 0.02, len(samples)).astype(np.float32)
    turns = turns_of(samples, 1600)
    assert [round(start, 1) for start, _ in turns[-2:]] == [1.7, 4.7]
