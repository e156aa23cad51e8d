"""Pooling over the real engine core in this process, whose model is a hash function that tests can hold."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from cancel_everywhere import ABORTED, BETWEEN, RESUMING, WAITING, Target, cancel_everywhere
from cancel_report import tell
from hash_pooling import HashPoolingRunner, PoolingWorld, open_hash_pooling_llm
from helpers_pooling import EMBEDDER, hash_of
from trioserve import EngineDeadError, EngineGenerateError, InvalidRequestError, LoRARequest, PoolingParams
from trioserve.config import PoolerConfig
from trioserve.errors import EngineStartError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from trioserve import AsyncLLM

TEXTS = ["one", "two, longer", "three"]
EMBED = PoolingParams(task="embed")


def expected(text: str) -> list[float]:
    return list(hash_of(list(text.encode()), [], EMBED, EMBEDDER).tolist())


async def embeddings(llm: AsyncLLM, texts: list[str], **routing: Any) -> list[list[float]]:
    outputs = await llm.encode_many(texts, **routing)
    return [output.outputs.data.tolist() for output in outputs]


@pytest.fixture
def runner() -> HashPoolingRunner:
    return HashPoolingRunner(fails_on=ord("!"))


@pytest.fixture
async def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: HashPoolingRunner):
    async with open_hash_pooling_llm(tmp_path, monkeypatch, runner) as opened:
        yield opened
        assert opened.num_open_requests == opened._outputs.admission.num_open == 0
        await opened.wait_for_requests_to_drain(10)  # what was aborted in a step is free when that is back
        await opened.check_health()
        assert opened._outputs.num_unfreed == 0
        totals = opened.metrics.totals()
        assert (totals.running, totals.waiting) == (0, 0)
    assert runner.is_closed


async def test_texts_that_come_together_are_computed_together(
    llm: AsyncLLM, runner: HashPoolingRunner
) -> None:
    assert await embeddings(llm, TEXTS) == [expected(text) for text in TEXTS]
    assert sorted(length for batch in runner.batches for length in batch) == [3, 5, 11]
    assert len(runner.batches) <= 2  # the first message may get a step of its own
    assert llm.ready.num_blocks == llm.ready.kv_cache_bytes == 0


async def test_results_that_are_too_many_for_one_message_come_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trioserve.link import pooling_columns

    monkeypatch.setattr(pooling_columns, "_MAX_VALUES", 100)
    async with open_hash_pooling_llm(tmp_path, monkeypatch, HashPoolingRunner()) as llm:
        params = PoolingParams(task="token_embed")
        for text, output in zip(TEXTS, await llm.encode_many(TEXTS, params), strict=True):
            values = hash_of(list(text.encode()), [], params, EMBEDDER)
            assert np.array_equal(np.array(output.outputs.tolist(), dtype=np.float32), values)


async def test_an_abort_of_waiting_texts_takes_effect_before_the_next_step(
    llm: AsyncLLM, runner: HashPoolingRunner, nursery: trio.Nursery
) -> None:
    with runner.steps_held():
        nursery.start_soon(embeddings, llm, ["in the step"])
        await runner.wait_begun()
        with trio.move_on_after(0.05):
            await embeddings(llm, ["waits"] * 3)
        nursery.start_soon(embeddings, llm, ["comes later"])
        await wait_all_tasks_blocked()
        await llm.check_health()
        assert llm._outputs.num_unfreed == 0, "they held nothing"
    await llm.wait_for_requests_to_drain(10)
    assert runner.batches == [[11], [11]]


async def test_an_abort_of_texts_in_a_step_is_done_when_the_step_is(
    llm: AsyncLLM, runner: HashPoolingRunner
) -> None:
    with runner.steps_held():
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(embeddings, llm, ["a", "b"])
                await runner.wait_begun()
                await llm.check_health()
                scope.cancel()
        await llm.check_health()
        assert llm._outputs.num_unfreed == 2
        assert llm.num_open_requests == 0
    await llm.wait_for_requests_to_drain(10)
    await llm.check_health()
    assert llm._outputs.num_unfreed == 0


async def test_one_text_that_fails_is_its_request_s_own(llm: AsyncLLM, nursery: trio.Nursery) -> None:
    async def fail() -> None:
        with pytest.raises(EngineGenerateError, match="failed inside the engine"):
            await llm.encode_many(["fine", "!", "fine"])

    nursery.start_soon(fail)
    assert await embeddings(llm, TEXTS) == [expected(text) for text in TEXTS]


async def test_what_the_runner_raises_is_the_engine_s_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: HashPoolingRunner
) -> None:
    async with open_hash_pooling_llm(tmp_path, monkeypatch, runner) as llm:
        runner.error = RuntimeError("the hash function is broken")
        with pytest.raises(EngineDeadError, match="the hash function is broken"):
            await llm.encode_many(TEXTS)
        await llm.wait_dead()
        with pytest.raises(EngineDeadError):
            await llm.encode_many(TEXTS)
        assert llm.num_open_requests == llm._outputs.admission.num_open == 0


async def test_a_new_core_takes_over_what_the_old_one_had_not_pooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = HashPoolingRunner()
    args: dict[str, Any] = {
        "engine_restart": "on-failure",
        "engine_restart_backoff": 0.01,
        "requeue_on_restart": True,
        "max_num_batched_tokens": 16,
    }
    async with open_hash_pooling_llm(tmp_path, monkeypatch, runner, **args) as llm:
        results: list[object] = []

        async def ask() -> None:
            results.append(await embeddings(llm, [*TEXTS, "the fourth text"]))

        with runner.steps_held():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await runner.wait_begun()
                runner.let_go()
                await runner.wait_begun()  # what the first step gave is on its way, and a second one runs
                await llm.check_health()
                runner.error = RuntimeError("broken")
                runner.let_go()
                with suppress(TimeoutError):
                    await _until(lambda: not llm.is_running)
                runner.error = None
                runner.is_holding = False
                runner.let_go()
        assert results == [[expected(text) for text in [*TEXTS, "the fourth text"]]]
        # Of the texts of the first step none is computed again.
        assert sum(map(sum, runner.batches)) < 2 * sum(map(len, [*TEXTS, "the fourth text"]))


async def _until(is_true: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not is_true():  # noqa: ASYNC110 - it comes over a socket
            await trio.sleep(0.001)


# Controls


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_asleep_nothing_is_pooled(
    llm: AsyncLLM, runner: HashPoolingRunner, nursery: trio.Nursery, level: int
) -> None:
    await llm.sleep(level)
    assert runner.has_weights == (level < 2)
    results: list[object] = []

    async def ask() -> None:
        results.append(await embeddings(llm, ["text"]))

    nursery.start_soon(ask)
    await wait_all_tasks_blocked()
    await llm.check_health()
    assert results == runner.batches == []
    await llm.wake_up()
    await _until(lambda: bool(results))
    assert results == [[expected("text")]]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_pauses(llm: AsyncLLM, runner: HashPoolingRunner, nursery: trio.Nursery, mode: Any) -> None:
    results: dict[str, object] = {}

    async def ask(text: str) -> None:
        try:
            results[text] = await embeddings(llm, [text])
        except EngineGenerateError as error:
            results[text] = str(error)

    with runner.steps_held():
        nursery.start_soon(ask, "in a step")
        await runner.wait_begun()
        nursery.start_soon(ask, "waits")
        await wait_all_tasks_blocked()
        nursery.start_soon(llm.pause_generation, mode)
        await wait_all_tasks_blocked()
    await _until(lambda: "in a step" in results)
    await llm.check_health()
    if mode == "abort":
        assert set(results.values()) == {"A text was not pooled: the request was aborted."}
    else:
        assert results == {"in a step": [expected("in a step")]}
    assert await llm.is_paused()
    assert await llm.reset_prefix_cache()
    await llm.resume_generation()
    await _until(lambda: len(results) == 2)


async def test_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = HashPoolingRunner()
    async with open_hash_pooling_llm(tmp_path, monkeypatch, runner, enable_lora=True) as llm:
        with pytest.raises(InvalidRequestError, match="models that pool take no adapters"):
            await llm.load_lora(LoRARequest("a", 1, "somewhere"))
    modules = [{"name": "a", "path": "somewhere"}]
    with pytest.raises(EngineStartError, match="models that pool take no adapters"):
        async with open_hash_pooling_llm(
            tmp_path, monkeypatch, runner, enable_lora=True, lora_modules=modules
        ):
            pass


# Cancelled at every checkpoint


async def _encode(world: PoolingWorld, target: Target, texts: list[str]) -> object:
    target.abort = partial(world.llm.abort, "mine")
    with target.here():
        try:
            return await embeddings(world.llm, texts, request_id="mine")
        except EngineGenerateError:
            return ABORTED
    return None


async def _score(world: PoolingWorld, target: Target) -> object:
    target.abort = partial(world.llm.abort, "mine")
    with target.here():
        scores = await world.llm.score("a", ["a", "a"], request_id="mine")
        return [round(score.outputs.score, 6) for score in scores]
    return None


_LONG_TEXT = "long " * 1_000

KINDS: dict[str, tuple[Callable[[PoolingWorld, Target], Awaitable[object]], object]] = {
    "encode_many": (partial(_encode, texts=TEXTS), [expected(text) for text in TEXTS]),
    "a text in many pieces, tokenized in a thread": (partial(_encode, texts=[_LONG_TEXT]), None),
    "score": (_score, [1.0, 1.0]),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_left_wherever_it_is_cancelled(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    run, result = KINDS[kind]
    config = PoolerConfig(enable_chunked_processing=True)
    async with open_hash_pooling_llm(tmp_path, monkeypatch, HashPoolingRunner(), pooler_config=config) as llm:
        world = PoolingWorld(llm)
        wanted = await embeddings(llm, [_LONG_TEXT]) if result is None else result
        found = await cancel_everywhere(
            f"pooling: {kind}", world, partial(run, world), wanted, moments=(WAITING, RESUMING, BETWEEN)
        )
        tell(record_property, "pooling core, in process", found)
