"""Models that pool: a hash function of the tokens in place of a network, and what it must give."""

from __future__ import annotations

import hashlib
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import trio

import trioserve.async_llm
from byte_tokenizer import byte_model, save_byte_tokenizer
from trioserve.args import EngineArgs
from trioserve.async_llm import AsyncLLM
from trioserve.config import Pooler
from trioserve.link import core_server
from trioserve.link.columns import unpack_token_ids
from trioserve.worker.pooling_batch import PooledSequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    import pytest

    from trioserve.config import ResolvedModel
    from trioserve.link.messages import AddPooling
    from trioserve.pooling_params import PoolingParams
    from trioserve.tasks import Task
    from trioserve.worker.pooling_batch import PoolingSequence

__all__ = [
    "CLASSIFIER",
    "CROSS_ENCODER",
    "EMBEDDER",
    "HIDDEN_SIZE",
    "HashPoolingRunner",
    "hash_of",
    "hash_values",
    "open_hash_pooling_llm",
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


class HashPoolingRunner:
    """The hash function in place of a model. Computes at once, or holds each step until it is let go."""

    kernels = "a hash function"

    def __init__(self, pooler: Pooler = EMBEDDER, *, fails_on: int | None = None) -> None:
        """`fails_on`: a token; texts with it fail."""
        self.pooler = pooler
        self.fails_on = fails_on
        self.error: Exception | None = None
        """What the next step raises."""
        self.batches: list[list[int]] = []
        """Of each step, how many tokens each of its texts has."""
        self.has_weights = True
        self.is_closed = False
        self.is_holding = False
        self.begun = threading.Semaphore(0)
        """One for each step that is held."""
        self._gates = threading.Semaphore(0)

    def pool(self, batch: Sequence[PoolingSequence]) -> list[PooledSequence]:
        assert self.has_weights
        self.batches.append([len(sequence.token_ids) for sequence in batch])
        if self.is_holding:
            self.begun.release()
            self._gates.acquire()
        if self.error is not None:
            raise self.error
        return [self._pool_one(sequence) for sequence in batch]

    def _pool_one(self, sequence: PoolingSequence) -> PooledSequence:
        if self.fails_on in sequence.token_ids:
            return PooledSequence(data=None, failure="it was told to fail")
        data = hash_of(sequence.token_ids, sequence.token_type_ids or [], sequence.params, self.pooler)
        return PooledSequence(data=data)

    @contextmanager
    def steps_held(self) -> Iterator[None]:
        """From here on each step waits for `let_go`; on leaving, all go."""
        self.is_holding = True
        try:
            yield
        finally:
            self.is_holding = False
            self.let_go()
            self.let_go()  # one that is held, and one that may have been about to be

    def let_go(self) -> None:
        self._gates.release()

    async def wait_begun(self) -> None:
        """Until a step is held that was not waited for before."""
        with trio.fail_after(10):
            while not self.begun.acquire(blocking=False):  # noqa: ASYNC110 - it comes from a thread
                await trio.sleep(0.001)

    def free_weights(self) -> None:
        self.has_weights = False

    def load_weights(self) -> None:
        self.has_weights = True

    def close(self) -> None:
        self.is_closed = True


@asynccontextmanager
async def open_hash_pooling_llm(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    runner: HashPoolingRunner,
    *,
    context_length: int = 64,
    **engine_args: Any,
) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM over a real core in this process that computes with `runner`."""
    save_byte_tokenizer(directory)
    model = pooling_model(directory, runner.pooler, context_length=context_length)

    def load(_: object, closing: ExitStack) -> HashPoolingRunner:
        closing.callback(runner.close)
        return runner

    monkeypatch.setattr(core_server, "_load_pooling", load)
    monkeypatch.setattr(trioserve.async_llm, "resolve_model", lambda _: model)
    args = {"model": "hash", "engine": "inproc", "log": {"stats_interval": 0}, **engine_args}
    async with AsyncLLM.from_engine_args(EngineArgs.from_dict(args)) as llm:
        yield llm
