"""An AsyncLLM over a real engine core in this process, whose model is a hash function that tests can hold."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

import trioserve.async_llm
from byte_tokenizer import byte_model, save_byte_tokenizer
from helpers_core import PagedRunner
from trioserve.args import EngineArgs
from trioserve.async_llm import AsyncLLM
from trioserve.errors import LoRANotFoundError
from trioserve.link import core_server
from trioserve.worker.kv_layout import KVCacheLayout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    import pytest

    from trioserve.sampling_params import SamplingParams
    from trioserve.worker.batch import SequenceOutput, StepBatch

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


class SteppedRunner(PagedRunner):
    """Computes at once, or holds each step until the test lets it go."""

    bytes_per_block = 1

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, KVCacheLayout(block_size=BLOCK_SIZE))
        self.is_holding = False
        self.begun = threading.Semaphore(0)
        """One for each step that is held."""
        self.adapters: set[str] = set()
        """By their keys."""
        self._gates = threading.Semaphore(0)

    def execute(self, batch: StepBatch) -> list[SequenceOutput]:
        wanted = {sequence.lora for sequence in batch.sequences} - {None}
        assert wanted <= self.adapters, "an adapter is gone before its sequences"
        if self.is_holding:
            self.begun.release()
            self._gates.acquire()
        return super().execute(batch)

    def let_go(self, count: int = 1) -> None:
        """Let so many of the steps run that are held, or will be."""
        for _ in range(count):
            self._gates.release()

    def max_num_seqs(self, num_blocks: int) -> None:
        """There is no limit."""

    def check_params(self, params: SamplingParams) -> None:
        """It can do everything."""

    def read_adapter(self, path: str) -> str:
        if path == "missing":
            raise LoRANotFoundError("There is no LoRA adapter in missing.")
        return path

    def add_adapter(self, key: str, _: str) -> None:
        self.adapters.add(key)

    def remove_adapter(self, key: str) -> None:
        self.adapters.discard(key)

    def close(self) -> None:
        """It holds nothing."""


class _NoGrammars:
    def try_get(self, _: object) -> None:
        raise AssertionError("no test here has a grammar")


@attrs.define(eq=False)
class HashEngine:
    llm: AsyncLLM
    runner: SteppedRunner

    @property
    def num_steps(self) -> int:
        """Those that have run."""
        return len(self.runner.batches)

    async def wait_begun(self) -> None:
        """Until a step is held that was not waited for before."""
        with trio.fail_after(10):
            while not self.runner.begun.acquire(blocking=False):  # noqa: ASYNC110 - it comes from a thread
                await trio.sleep(0.001)

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Until the core has told it: nothing is asked for."""
        with trio.fail_after(10):
            while not is_true():  # noqa: ASYNC110 - it comes over a socket
                await trio.sleep(0.001)

    @contextmanager
    def steps_held(self) -> Iterator[None]:
        """From here on each step waits for `runner.let_go`; on leaving, all go."""
        self.runner.is_holding = True
        try:
            yield
        finally:
            self.runner.is_holding = False
            self.runner.let_go(2)  # the one that is held, and one that may have been about to be


@asynccontextmanager
async def open_hash_llm(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, num_blocks: int = 64, **engine_args: Any
) -> AsyncIterator[HashEngine]:
    save_byte_tokenizer(directory)
    runner = SteppedRunner(num_blocks)
    model = byte_model(str(directory), context_length=MAX_MODEL_LEN, architecture="HashForCausalLM")

    @asynccontextmanager
    async def open_compiler(*_: object) -> AsyncIterator[_NoGrammars]:
        await trio.lowlevel.checkpoint()
        yield _NoGrammars()

    monkeypatch.setattr(core_server, "_load", lambda *_: (num_blocks, runner))
    monkeypatch.setattr(core_server.GrammarCompiler, "open", open_compiler)
    monkeypatch.setattr(trioserve.async_llm, "resolve_model", lambda _: model)
    args = EngineArgs.from_dict(
        {
            "model": "hash",
            "engine": "inproc",
            "log": {"stats_interval": 0},
            "block_size": BLOCK_SIZE,
            **engine_args,
        }
    )
    async with AsyncLLM.from_engine_args(args) as llm:
        yield HashEngine(llm, runner)
