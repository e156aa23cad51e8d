"""Models that pool: a hash function of the tokens in place of a network, and what it must give."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import attrs
import numpy as np

from byte_tokenizer import byte_model
from trioserve.config import Pooler
from trioserve.link.columns import unpack_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trioserve.config import ResolvedModel
    from trioserve.link.messages import AddPooling
    from trioserve.pooling_params import PoolingParams
    from trioserve.tasks import Task

__all__ = [
    "CLASSIFIER",
    "CROSS_ENCODER",
    "EMBEDDER",
    "HIDDEN_SIZE",
    "hash_of",
    "hash_values",
    "pooling_model",
]

HIDDEN_SIZE = 8

EMBEDDER = Pooler(pooling_type="mean", hidden_size=HIDDEN_SIZE, dimensions=())
CLASSIFIER = Pooler(pooling_type="cls", hidden_size=HIDDEN_SIZE, labels=("no", "maybe", "yes"))
CROSS_ENCODER = Pooler(pooling_type="cls", hidden_size=HIDDEN_SIZE, labels=("LABEL_0",))

_TASKS: dict[int, tuple[Task, ...]] = {
    0: ("embed", "token_embed", "score"),
    1: ("classify", "token_classify", "score"),
    3: ("classify", "token_classify"),
}
"""By the number of labels."""


def pooling_model(
    directory: Path | str, pooler: Pooler = EMBEDDER, *, context_length: int = 64, **changes: object
) -> ResolvedModel:
    """A model with the tokenizer of bytes, which lies in `directory`; its tasks are those of its pooler."""
    model = byte_model(str(directory), context_length=context_length, architecture="HashModel")
    tasks = _TASKS[len(pooler.labels)]
    return attrs.evolve(model, runner="pooling", pooler=pooler, tasks=tasks, **changes)


def hash_values(text: AddPooling, pooler: Pooler) -> np.ndarray:
    """What the engine answers."""
    return hash_of(unpack_token_ids(text.prompt_token_ids), list(text.token_type_ids), text.params, pooler)


def hash_of(
    token_ids: Sequence[int], type_ids: Sequence[int], params: PoolingParams, pooler: Pooler
) -> np.ndarray:
    """float32: [num_values], or [num_tokens, num_values] for the tasks token_...."""
    given = [list(token_ids), list(type_ids)]
    if params.task in {"embed", "classify"}:
        return _row(given, params, pooler)
    return np.stack([_row([*given, place], params, pooler) for place in range(len(token_ids))])


def _row(given: object, params: PoolingParams, pooler: Pooler) -> np.ndarray:
    digest = hashlib.sha256(repr(given).encode()).digest()
    values = np.frombuffer(digest, dtype=np.uint8).astype(np.float64) / 64 - 2
    activates = pooler.normalizes if params.use_activation is None else params.use_activation
    if params.task in {"embed", "token_embed"}:
        values = values[: params.dimensions or pooler.hidden_size]
        values = values / np.linalg.norm(values) if activates else values
    else:
        values = values[: len(pooler.labels)]
        if activates:
            values = 1 / (1 + np.exp(-values)) if len(values) == 1 else _softmax(values)
    return values.astype(np.float32)


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max())
    return powers / powers.sum()
