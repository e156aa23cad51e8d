"""When tokens were said: the way through costs, and times against transformers'."""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import ModelOutput

from helpers_whisper import features, noise, tiny_whisper
from helpers_worker import engine_config
from trioserve.worker.alignment import warp
from trioserve.worker.whisper_executor import WhisperExecutor

if TYPE_CHECKING:
    from pathlib import Path


def cost_of(costs: np.ndarray, entered: list[int]) -> float:
    """Of the way that enters each row at these columns, and stays in a row until the next is entered.

    A row that is entered where the one before is left may share its column with it, or not: the cheaper.
    """
    num_columns = costs.shape[1]
    total = 0.0
    for row, first in enumerate(entered):
        after = entered[row + 1] if row + 1 < len(entered) else num_columns
        total += costs[row, first : max(after, first + 1)].sum()
    return total


def cheapest(costs: np.ndarray) -> float:
    """By the definition, cell by cell."""
    total = np.full((costs.shape[0] + 1, costs.shape[1] + 1), np.inf)
    total[0, 0] = 0
    for row, column in np.ndindex(*costs.shape):
        before = min(total[row, column], total[row, column + 1], total[row + 1, column])
        total[row + 1, column + 1] = costs[row, column] + before
    return float(total[-1, -1])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 7), columns=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_the_way_is_as_cheap_as_any(rows: int, columns: int, seed: int) -> None:
    costs = np.random.default_rng(seed).normal(size=(rows, columns))
    entered = warp(costs)
    assert entered == sorted(entered)
    assert entered[0] == 0
    assert all(0 <= column < columns for column in entered)
    if all(b > a for a, b in itertools.pairwise(entered)):
        assert cheapest(costs) <= cost_of(costs, entered) + 1e-9


def test_the_way_follows_what_is_cheap() -> None:
    costs = np.ones((4, 20))
    for row, (first, end) in enumerate([(0, 3), (3, 10), (10, 11), (11, 20)]):
        costs[row, first:end] = -1
    assert warp(costs) == [0, 3, 10, 11]


def test_times_are_those_of_transformers(tmp_path: Path) -> None:
    theirs, model = tiny_whisper(tmp_path)
    theirs.set_attn_implementation("eager")  # the only one that shows its weights
    theirs.generation_config.alignment_heads = [[2, head] for head in range(4)] + [
        [1, head] for head in range(4)
    ]
    audio, prompt, text = noise(3, 4.0), [3, 9], [60, 7, 99, 12, 31, 8, 77, 5]
    tokens = torch.tensor([[*prompt, *text]])
    with torch.inference_mode():
        attentions = theirs(
            features(audio), decoder_input_ids=tokens, output_attentions=True
        ).cross_attentions

    generated = ModelOutput(cross_attentions=[attentions], sequences=tokens)
    expected = theirs._extract_token_timestamps(
        generated, theirs.generation_config.alignment_heads, num_frames=400, num_input_ids=len(prompt)
    )
    with closing(WhisperExecutor(model, engine_config(), "a test")) as executor:
        executor.allocate_kv_cache(16)
        found = executor.align(audio, [*prompt, *text], len(prompt))
        np.testing.assert_allclose(found, expected[0, len(prompt) : -1], atol=0.03)
        executor.free_kv_cache()
        with pytest.raises(ValueError, match="asleep"):
            executor.align(audio, [*prompt, *text], len(prompt))
