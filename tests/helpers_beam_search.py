"""A beam search with a model that is a function, for comparing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trioserve.frontend.beam_search import BeamSearch
from trioserve.worker.batch import LogprobRow

if TYPE_CHECKING:
    from trioserve.beam_search_params import BeamSearchParams
    from trioserve.frontend.beam_search import Beam

Model = Callable[[Sequence[int]], np.ndarray]
"""Tokens -> float64 logits of the next one."""


def random_model(vocab_size: int, seed: int = 0) -> Model:
    """Logits that depend on all tokens, and are the same for the same ones."""

    def logits(tokens: Sequence[int]) -> np.ndarray:
        return np.random.default_rng([seed, len(tokens), *tokens]).normal(scale=2.0, size=vocab_size)

    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def row_of(logprobs: np.ndarray, number: int) -> LogprobRow:
    """As the sampler reports them: the sampled token, here the most likely one, and the top `number`."""
    order = np.argsort(-logprobs, kind="stable")
    chosen = [int(order[0]), *map(int, order[:number])]
    ranks = [1, *range(1, len(chosen))]
    return LogprobRow(chosen, [float(logprobs[token]) for token in chosen], ranks)


def search(model: Model, prompt: Sequence[int], params: BeamSearchParams, eos: Sequence[int]) -> BeamSearch:
    """Run it to the end."""
    found = BeamSearch(prompt, params, eos)
    number = 2 * params.beam_width if params.temperature in {0, 1} else 10**6
    while not found.is_done:
        rows = [
            row_of(log_softmax(model(array("i", beam.token_ids).tolist())), number) for beam in found.live
        ]
        found.advance(rows)
    return found


def tokens_of(beam: Beam, prompt: Sequence[int]) -> list[int]:
    return array("i", beam.token_ids).tolist()[len(prompt) :]
