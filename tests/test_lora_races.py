"""Adapters that come and go while requests are on their way, run, or wait for the next engine core."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from fake_engine import FakeEngine, open_fake_llm
from hash_engine import HashEngine, open_hash_llm
from helpers_lora_cores import Cores, lora_calls
from trioserve import InvalidRequestError, LoRANotFoundError, LoRARequest, SamplingParams
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SQL = LoRARequest("sql", 1, "adapters/sql")
AGAIN = attrs.evolve(SQL, load_inplace=True)
ONE_TOKEN = SamplingParams(max_tokens=1)


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeEngine]:
    async with open_fake_llm(tmp_path, monkeypatch, enable_lora=True) as engine:
        engine.client.answers["load_lora"] = None
        yield engine


def delay_tokenizing(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """Prompts are tokenized once this is set."""
    gate = trio.Event()
    inputs = engine.llm._requests.inputs
    tokenize = inputs.tokenize

    async def later(prompt: Any) -> Any:
        await gate.wait()
        return await tokenize(prompt)

    monkeypatch.setattr(inputs, "tokenize", later)
    return gate


@pytest.mark.parametrize("num_reloads", [1, 3])
async def test_a_request_on_its_way_gets_what_replaces_its_adapter(
    num_reloads: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = delay_tokenizing(engine, monkeypatch)
    await engine.llm.load_lora(SQL)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            async with engine.llm.stream("Hi", ONE_TOKEN, lora_request=LoRARequest("sql")):
                assert engine.client.added[-1].lora == f"sql#{1 + num_reloads}"
                assert ("unload_lora", f"sql#{1 + num_reloads}") not in engine.client.calls

        await trio.testing.wait_all_tasks_blocked()
        for _ in range(num_reloads):
            await engine.llm.load_lora(AGAIN)
        gate.set()
    await engine.llm.unload_lora("sql")
    assert {call[1] for call in lora_calls(engine.client) if call[0] == "unload_lora"} == {
        f"sql#{number}" for number in range(1, 2 + num_reloads)
    }


async def test_a_request_on_its_way_whose_adapter_is_unloaded(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = delay_tokenizing(engine, monkeypatch)
    await engine.llm.load_lora(SQL)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            with pytest.raises(LoRANotFoundError, match="under the name 'sql'"):
                await engine.llm.complete("Hi", ONE_TOKEN, lora_request=LoRARequest("sql"))

        await trio.testing.wait_all_tasks_blocked()
        await engine.llm.unload_lora("sql")
        gate.set()
    assert engine.client.added == []


async def test_an_adapter_that_is_unloaded_while_it_is_replaced(engine: FakeEngine) -> None:
    await engine.llm.load_lora(SQL)
    gate = engine.client.answers["load_lora"] = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.llm.load_lora, AGAIN)
        await trio.testing.wait_all_tasks_blocked()
        await engine.llm.unload_lora("sql")
        gate.set()
    assert [adapter.key for adapter in await engine.llm.list_loras()] == ["sql#2"]
    assert lora_calls(engine.client)[-1] == ("unload_lora", "sql#1")
    await engine.llm.unload_lora("sql")
    assert lora_calls(engine.client)[-1] == ("unload_lora", "sql#2")


async def test_all_completions_and_pieces_of_a_request_have_one_and_the_same(engine: FakeEngine) -> None:
    async with engine.llm.stream("Hi", SamplingParams(n=3), lora_request=SQL):
        assert [add.lora for add in engine.client.added] == ["sql#1"] * 3
        await engine.llm.load_lora(AGAIN)

    async def pieces() -> AsyncIterator[str]:
        yield "one"
        await engine.llm.load_lora(AGAIN)
        yield "two"

    async with (
        trio.open_nursery() as nursery,
        engine.llm.stream(pieces(), ONE_TOKEN, lora_request=LoRARequest("sql")) as outputs,
    ):
        nursery.start_soon(_answer_all, engine, len(engine.client.added))
        assert [output async for output in outputs]
        nursery.cancel_scope.cancel()
    assert [add.lora for add in engine.client.added[3:]] == ["sql#2", "sql#2"]
    assert [adapter.key for adapter in await engine.llm.list_loras()] == ["sql#3"]


async def _answer_all(engine: FakeEngine, num_answered: int) -> None:
    while True:
        await trio.testing.wait_all_tasks_blocked()
        for add in engine.client.added[num_answered:]:
            engine.client.emit(add, "x", FinishReason.LENGTH)
            num_answered += 1
        await trio.sleep(0.001)


async def test_a_request_that_goes_to_the_next_core_keeps_what_was_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    cores = Cores()
    args = {"engine_restart": "on-failure", "requeue_on_restart": True, "lora_modules": ["a=1", "b=2"]}
    async with open_fake_llm(tmp_path, monkeypatch, enable_lora=True, open_core=cores.open, **args) as engine:
        async with engine.llm.stream("Hi", ONE_TOKEN, lora_request=LoRARequest("a")) as outputs:
            await engine.llm.unload_lora("a")
            cores.clients[0].die()
            with trio.fail_after(60):
                while len(cores.clients) < 2 or not cores.clients[1].added:  # noqa: ASYNC110 - of a mock clock
                    await trio.sleep(0.1)
            assert cores.told[1] == ["a#1", "b#2"]
            (add,) = cores.clients[1].added
            assert add.lora == "a#1"
            cores.clients[1].emit(add, "x", FinishReason.LENGTH)
            assert [output.finished async for output in outputs] == [True]
        assert lora_calls(cores.clients[1]) == [("unload_lora", "a#1")]


async def test_a_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads, reloads and unloads of a few names, while requests with them run, end and are left; with few
    blocks, so that there are preemptions. The runner sees to it that every sequence's adapter is there."""
    async with open_hash_llm(
        tmp_path, monkeypatch, num_blocks=24, enable_lora=True, max_loras=2, max_cpu_loras=5, max_num_seqs=4
    ) as engine:
        counts = {"finished": 0, "refused": 0}
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for seed in range(4):
                    nursery.start_soon(_load_and_unload, engine, random.Random(seed))
                for seed in range(6):
                    nursery.start_soon(_request, engine, random.Random(seed), counts)
        assert min(counts.values()) > 5, counts
        await engine.llm.check_health()
        kept = {adapter.key for adapter in await engine.llm.list_loras()}
        await engine.until(lambda: engine.runner.adapters == kept)
        for adapter in await engine.llm.list_loras():
            await engine.llm.unload_lora(adapter.name)
        await engine.until(lambda: not engine.runner.adapters)


async def _load_and_unload(engine: HashEngine, rng: random.Random) -> None:
    for _ in range(30):
        request = LoRARequest(rng.choice("abc"), 1, "1", load_inplace=rng.random() < 0.6)
        try:
            with trio.move_on_after(rng.choice([0, 0.001, 1])):
                if rng.random() < 0.6:
                    await engine.llm.load_lora(request)
                else:
                    await engine.llm.unload_lora(request.lora_name)
        except InvalidRequestError:
            await trio.lowlevel.checkpoint()  # it is there already, or is not


async def _request(engine: HashEngine, rng: random.Random, counts: dict[str, int]) -> None:
    for _ in range(15):
        params = SamplingParams(max_tokens=rng.randrange(1, 12), n=rng.choice([1, 1, 2]), ignore_eos=True)
        adapter = LoRARequest(rng.choice("abc"))
        try:
            with trio.move_on_after(rng.choice([0.002, 1, 1])):
                await engine.llm.complete("x" * rng.randrange(1, 20), params, lora_request=adapter)
                counts["finished"] += 1
        except LoRANotFoundError:
            counts["refused"] += 1
            await trio.sleep(0.001)
