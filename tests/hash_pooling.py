"""The engine core in this process; its model that pools is a hash function, which tests can hold."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import wait_all_tasks_blocked

import trioserve.async_llm
from byte_tokenizer import save_byte_tokenizer
from cancel_everywhere import BesideANeighbour, LeakError
from helpers_pooling import EMBEDDER, hash_of, pooling_model
from trioserve.args import EngineArgs
from trioserve.async_llm import AsyncLLM
from trioserve.link import core_server
from trioserve.pooling_params import PoolingParams
from trioserve.worker.pooling_batch import PooledSequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    import pytest

    from trioserve.config import Pooler
    from trioserve.worker.pooling_batch import PoolingSequence

__all__ = ["HashPoolingRunner", "PoolingWorld", "open_hash_pooling_llm"]

_NEIGHBOUR = "beside it"


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


class PoolingWorld(BesideANeighbour):
    """A `cancel_everywhere.World` over a core that pools."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm

    async def _be_a_neighbour(self) -> None:
        params = PoolingParams(task="embed")
        expected = hash_of(list(_NEIGHBOUR.encode()), [], params, EMBEDDER).tolist()
        while not self.is_enough:
            output = await self.llm.encode(_NEIGHBOUR)
            if output.outputs.tolist() != expected:
                raise LeakError("a neighbour got something else")

    async def num_running(self) -> int:
        await self.llm.check_health()
        totals = self.llm.metrics.totals()
        return totals.running + totals.waiting

    async def find_leaks(self) -> Mapping[str, object]:
        totals = self.llm.metrics.totals()
        found = {
            "open requests": self.llm.num_open_requests,
            "places": self.llm._outputs.admission.num_open,
            "not freed": self.llm._outputs.num_unfreed,
            "running": totals.running,
            "waiting": totals.waiting,
        }
        return {what: which for what, which in found.items() if which}

    async def rest(self) -> None:
        """What was aborted in a step is free when that is back."""
        await self.llm.wait_for_requests_to_drain(10)
        await self.llm.check_health()
        await wait_all_tasks_blocked()
