"""An engine core that does what a test tells it, in place of the real one under AsyncLLM."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

import trioserve.async_llm
from byte_tokenizer import byte_model, save_byte_tokenizer
from helpers_pooling import hash_values
from trioserve.args import EngineArgs
from trioserve.async_llm import AsyncLLM
from trioserve.core.pooling_request import PoolingResult
from trioserve.core.stats import CoreStats
from trioserve.core.step_result import StepResult
from trioserve.errors import EngineDeadError, TrioserveError
from trioserve.link.columns import pack_step
from trioserve.link.messages import Add, AddPooling, PooledOutputs, Ready, Refused, StepOutputs
from trioserve.link.pooling_columns import pack_pooled
from trioserve.outputs import FinishReason
from trioserve.version import __version__
from trioserve.worker.batch import SampledToken
from trioserve.worker.pooling_batch import PooledSequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    import numpy as np
    import pytest

    from trioserve.config import Pooler, ResolvedModel
    from trioserve.worker.batch import LogprobRow

STATS = CoreStats(
    num_running=0,
    num_waiting=0,
    kv_cache_usage=0.0,
    num_preemptions=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    num_prompt_tokens=0,
    num_generation_tokens=0,
)


class FakeEngineClient:
    """The interface of EngineCoreClient, with both ends in the test's hands."""

    ready = Ready(
        protocol=1,
        version=__version__,
        config_hash="",
        num_blocks=8,
        block_size=16,
        kv_cache_bytes=1,
        load_seconds=0.0,
        kernels="fake kernels",
    )

    def __init__(self) -> None:
        self.added: list[Add] = []
        self.texts: list[AddPooling] = []
        """That were sent to be pooled."""
        self.pools_as: Pooler | None = None
        """Texts are answered at once with `hash_values`; None: only by `emit_pooled`."""
        self.aborted: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        """By method; an Event is waited for. True for all others."""
        self.ending: str | None = None
        """What `reap` says."""
        self.ended_by_itself: str | None = None
        self._dead: TrioserveError | None = None
        self._send, self._receive = trio.open_memory_channel[
            StepOutputs | PooledOutputs | Refused | EngineDeadError
        ](math.inf)

    def add(self, request: Add | AddPooling) -> None:
        self._check_alive()
        if isinstance(request, Add):
            self.added.append(request)
            return
        self.texts.append(request)
        if self.pools_as is not None:
            self.emit_pooled(request, hash_values(request, self.pools_as))

    def add_again(self, request: Add | AddPooling) -> None:
        self.add(request)

    async def wait_room(self) -> None:
        await trio.lowlevel.checkpoint()

    def abort(self, request_ids: list[int]) -> None:
        self.aborted += request_ids

    async def call(self, method: str, *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self._check_alive()
        self.calls.append((method, *args))
        answer = self.answers.get(method, True)
        if isinstance(answer, trio.Event):
            await answer.wait()
            return None
        return answer

    def tell(self, method: str, *args: Any) -> None:
        if self._dead is None:
            self.calls.append((method, *args))

    async def receive(self) -> StepOutputs | PooledOutputs | Refused:
        item = await self._receive.receive()
        if isinstance(item, EngineDeadError):
            self._dead = item
            raise item
        return item

    def end(self, error: TrioserveError) -> None:
        self._dead = self._dead or error

    async def reap(self) -> str | None:
        await trio.lowlevel.checkpoint()
        return self.ending

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    # For the test

    def die(self, reason: str = "killed by the test") -> None:
        self._send.send_nowait(EngineDeadError(reason))

    def emit_nonsense(self) -> None:
        """A step whose columns do not fit together."""
        step = pack_step(StepResult(), STATS)
        self._send.send_nowait(attrs.evolve(step, request_ids=bytes(8)))

    def emit_freed(self, *sequence_ids: int, stats: CoreStats = STATS) -> None:
        """Aborted sequences are free; or only other stats."""
        self._send.send_nowait(pack_step(StepResult(freed=sequence_ids), stats))

    def emit_pooled(
        self, text: AddPooling, values: np.ndarray | None, finish: FinishReason = FinishReason.STOP
    ) -> None:
        """A step of which only this text has come."""
        result = PoolingResult(
            request_ids=[text.request_id], finish_reasons=[finish], pooled=[PooledSequence(data=values)]
        )
        self._send.send_nowait(pack_pooled(result, STATS))

    def refuse(self, request: Add | AddPooling, message: str, parameter: str) -> None:
        self._send.send_nowait(Refused(request_id=request.request_id, message=message, parameter=parameter))

    def emit(
        self,
        request: Add,
        text: str | bytes | Sequence[int | SampledToken] = (),
        finish: FinishReason | None = None,
        *,
        stop_token_id: int | None = None,
        prompt_logprobs: Sequence[LogprobRow] = (),
    ) -> None:
        """One step, in which only this request got something."""
        self.emit_step([(request, text, finish, stop_token_id)], prompt_logprobs=[prompt_logprobs])

    def emit_step(
        self,
        updates: Sequence[tuple[Add, Any, FinishReason | None, int | None]],
        *,
        prompt_logprobs: Sequence[Sequence[LogprobRow]] | None = None,
        num_cached_tokens: Sequence[int] | None = None,
        drop_last_token: bool = False,
    ) -> None:
        sampled = [_to_tokens(text) for _, text, _, _ in updates]
        result = StepResult(
            request_ids=[add.request_id for add, _, _, _ in updates],
            token_ids=[[token.token_id for token in tokens] for tokens in sampled],
            sampled=sampled,
            finish_reasons=[finish for _, _, finish, _ in updates],
            stop_token_ids=[stop for _, _, _, stop in updates],
            num_cached_tokens=num_cached_tokens or [0 for _ in updates],
            prompt_logprobs=prompt_logprobs or [() for _ in updates],
        )
        step = pack_step(result, STATS)
        if drop_last_token:
            step = attrs.evolve(step, token_ids=step.token_ids[:-4])
        self._send.send_nowait(step)


def _to_tokens(text: str | bytes | Sequence[int | SampledToken]) -> list[SampledToken]:
    items = text.encode() if isinstance(text, str) else text
    return [item if isinstance(item, SampledToken) else SampledToken(item) for item in items]


@attrs.frozen
class FakeEngine:
    llm: AsyncLLM
    client: FakeEngineClient


@asynccontextmanager
async def open_fake_llm(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    strict: bool = True,
    open_core: Callable[..., AbstractAsyncContextManager[FakeEngineClient]] | None = None,
    model: ResolvedModel | None = None,
    **engine_args: Any,
) -> AsyncIterator[FakeEngine]:
    """A real AsyncLLM over a fake engine core and a tokenizer of bytes. Strict: every scope has ended.
    `open_core`: where its cores come from, if not from here. `model`: in place of one that generates; if it
    pools, the core answers at once (`FakeEngineClient.pools_as`)."""
    save_byte_tokenizer(directory)
    client = FakeEngineClient()
    model = model or byte_model(str(directory), context_length=128)
    client.pools_as = model.pooler

    @asynccontextmanager
    async def open_client(*_: object) -> AsyncIterator[FakeEngineClient]:
        await trio.lowlevel.checkpoint()
        yield client

    monkeypatch.setattr(trioserve.async_llm, "open_client", open_core or open_client)
    monkeypatch.setattr(trioserve.async_llm, "resolve_model", lambda _: model)
    args = EngineArgs.from_dict({"model": "fake", "log": {"stats_interval": 0}, **engine_args})
    async with AsyncLLM.from_engine_args(args) as llm:
        yield FakeEngine(llm, client)
        assert not strict or llm.num_open_requests == 0, "a request outlived its scope"
