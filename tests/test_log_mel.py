"""Whisper's features, against those of transformers."""

from __future__ import annotations

import numpy as np
import pytest

from trioserve.worker.log_mel import LogMel


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("num_samples", [1, 159, 160, 161, 16_000, 477_777, 479_999, 480_000])
def test_features_are_those_of_transformers(bands: int, num_samples: int) -> None:
    from transformers import WhisperFeatureExtractor

    noise = np.random.default_rng(num_samples).normal(scale=0.1, size=num_samples)
    samples = (noise * (np.arange(num_samples) % 7000 < 3000)).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=bands)
    expected = extractor(samples, sampling_rate=16_000, return_tensors="np").input_features[0].T
    found = LogMel(bands).of(samples)
    assert (found.dtype, found.shape) == (np.float32, (3000, bands))
    # Both are float32: where there is nearly nothing, each is off by some 1e-5 of its own.
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    assert np.abs(found - expected).mean() < 1e-6


def test_silence_is_as_silent_as_it_gets() -> None:
    np.testing.assert_allclose(LogMel(80).of(np.zeros(1000, np.float32)), -1.5, atol=1e-6)
