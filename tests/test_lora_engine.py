"""Adapters between a frontend and an engine core: loading, holding, unloading, reloading."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from fake_engine import FakeEngine, open_fake_llm
from hash_engine import open_hash_llm
from helpers_core import Driver
from helpers_lora_cores import Cores, lora_calls
from trioserve import (
    BeamSearchParams,
    EngineArgs,
    EngineRestartingError,
    EngineStartError,
    InvalidConfigError,
    InvalidRequestError,
    LoRANotFoundError,
    LoRARequest,
    SamplingParams,
)
from trioserve.config import LoRAModule
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SQL = LoRARequest("sql", 1, "adapters/sql")
ONE_TOKEN = SamplingParams(max_tokens=1)


@asynccontextmanager
async def open_with_adapters(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **engine_args: Any
) -> AsyncIterator[FakeEngine]:
    async with open_fake_llm(directory, monkeypatch, enable_lora=True, **engine_args) as engine:
        engine.client.answers["load_lora"] = None
        yield engine


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeEngine]:
    async with open_with_adapters(tmp_path, monkeypatch) as engine:
        yield engine


async def run_one(engine: FakeEngine, lora_request: LoRARequest | None) -> str | None:
    """The key of the adapter that a request goes to the core with."""
    async with engine.llm.stream("Hi", ONE_TOKEN, lora_request=lora_request) as outputs:
        add = engine.client.added[-1]
        engine.client.emit(add, "x", FinishReason.LENGTH)
        async for _ in outputs:
            pass
    return add.lora


# Arguments


def test_adapters_of_the_command_line_and_of_programs() -> None:
    args = EngineArgs(
        enable_lora=True,
        lora_modules=[
            "sql=adapters/sql=2",
            '{"name": "law", "path": "law", "base_model_name": "base"}',
            {"name": "med", "path": "m"},
            LoRAModule(name="x", path="y"),
        ],
    )
    lora = args.create_engine_config().lora
    assert lora is not None
    assert [(module.name, module.path) for module in lora.modules] == [
        ("sql", "adapters/sql=2"), ("law", "law"), ("med", "m"), ("x", "y"),
    ]  # fmt: skip
    assert lora.modules[1].base_model_name == "base"
    assert EngineArgs().create_engine_config().lora is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_modules": ["a=b"]}, "lora_modules must be empty without enable_lora"),
        ({"enable_lora": True, "lora_modules": ["ab"]}, "lora_modules must be NAME=PATH or JSON"),
        ({"enable_lora": True, "lora_modules": ["=b"]}, "lora_modules must be NAME=PATH or JSON"),
        ({"enable_lora": True, "lora_modules": ["a\nb=c"]}, "of printable characters, got 'a.nb=c'"),
        ({"enable_lora": True, "lora_modules": ["a" * 1025 + "=c"]}, "of printable characters"),
        ({"enable_lora": True, "lora_modules": ["{"]}, "lora_modules must be a JSON object"),
        ({"enable_lora": True, "lora_modules": ['{"name": "a"}']}, "lora_modules.path is required"),
        ({"enable_lora": True, "lora_modules": ["a=b", "a=c"]}, "different names, got 'a'"),
        ({"enable_lora": True, "lora_modules": ["smollm2-135m=b"]}, "otherwise than the model itself"),
        (
            {"enable_lora": True, "lora_modules": ["a=b", "c=d"], "max_cpu_loras": 1},
            "at most max_cpu_loras=1",
        ),
        ({"enable_lora": True, "max_loras": 0}, "max_loras must be an integer >= 1"),
    ],
)
def test_wrong_arguments(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        EngineArgs(**values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_name": ""}, "lora_name must be 1 to 1024 printable characters"),
        ({"lora_name": "a\n"}, "lora_name must be"),
        ({"lora_name": "a", "lora_int_id": "path"}, "lora_int_id must be null or an integer"),
        ({"lora_name": "a", "lora_path": 3}, "lora_path must be"),
    ],
)
def test_wrong_requests_of_adapters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LoRARequest(**fields)


# Requests with adapters


async def test_a_request_loads_its_adapter_once(engine: FakeEngine) -> None:
    keys = [await run_one(engine, request) for request in (SQL, SQL, LoRARequest("sql"), None)]
    assert lora_calls(engine.client) == [("load_lora", "sql#1", "adapters/sql")]
    assert keys == ["sql#1", "sql#1", "sql#1", None]
    assert [adapter.name for adapter in await engine.llm.list_loras()] == ["sql"]


async def test_two_requests_at_a_time_load_it_once(engine: FakeEngine) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(_submit_and_release, engine)
    assert len(lora_calls(engine.client)) == 1


async def _submit_and_release(engine: FakeEngine) -> None:
    engine.llm.release(await engine.llm.submit("Hi", ONE_TOKEN, lora_request=SQL))


async def test_every_kind_of_request_takes_one(engine: FakeEngine) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_complete, engine)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.client.added[-1].lora == "sql#1"
        engine.client.emit(engine.client.added[-1], "x", FinishReason.LENGTH)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_search, engine)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.client.added[-1].lora == "sql#1"
        nursery.cancel_scope.cancel()
    generator = engine.llm.generate("Hi", ONE_TOKEN, lora_request=SQL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(anext, generator)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.client.added[-1].lora == "sql#1"
        engine.client.emit(engine.client.added[-1], "x", FinishReason.LENGTH)
    await generator.aclose()


async def _complete(engine: FakeEngine) -> None:
    await engine.llm.complete("Hi", ONE_TOKEN, lora_request=SQL)


async def _search(engine: FakeEngine) -> None:
    await engine.llm.beam_search("Hi", BeamSearchParams(beam_width=2, max_tokens=2), lora_request=SQL)


async def test_names_that_are_not_loaded(engine: FakeEngine) -> None:
    with pytest.raises(LoRANotFoundError, match="No LoRA adapter is loaded under the name 'law'"):
        await engine.llm.complete("Hi", ONE_TOKEN, lora_request=LoRARequest("law"))
    with pytest.raises(LoRANotFoundError):
        await engine.llm.unload_lora("law")
    engine.client.answers["load_lora"] = [True, "There is no LoRA adapter in x."]
    with pytest.raises(LoRANotFoundError, match="no LoRA adapter in x"):
        await engine.llm.load_lora(SQL)
    engine.client.answers["load_lora"] = [False, "The adapter's rank is too high."]
    with pytest.raises(InvalidRequestError, match="rank is too high"):
        await engine.llm.load_lora(SQL)
    with pytest.raises(InvalidRequestError, match="lora_name must not be the model's own name"):
        await engine.llm.load_lora(attrs.evolve(SQL, lora_name="fake"))
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest, got 'sql'"):
        await engine.llm.submit("Hi", ONE_TOKEN, lora_request="sql")
    assert await engine.llm.list_loras() == []


async def test_an_engine_without_adapters(fake: FakeEngine) -> None:
    for call in (fake.llm.load_lora(SQL), fake.llm.unload_lora("sql")):
        with pytest.raises(InvalidRequestError, match="started without enable_lora"):
            await call
    with pytest.raises(InvalidRequestError, match="started without enable_lora"):
        await fake.llm.complete("Hi", ONE_TOKEN, lora_request=SQL)


async def test_as_many_as_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_with_adapters(tmp_path, monkeypatch, max_cpu_loras=1) as engine:
        await engine.llm.load_lora(SQL)
        with pytest.raises(InvalidRequestError, match="max_cpu_loras=1 adapters are in memory"):
            await engine.llm.load_lora(LoRARequest("law", 2, "law"))
        await engine.llm.load_lora(attrs.evolve(SQL, load_inplace=True))
        async with engine.llm.stream("Hi", lora_request=SQL):
            await engine.llm.unload_lora("sql")
            with pytest.raises(InvalidRequestError, match="max_cpu_loras"):  # it is still held
                await engine.llm.load_lora(LoRARequest("law", 2, "law"))
        await engine.llm.load_lora(LoRARequest("law", 2, "law"))


# Unloading, and loading again


async def test_what_is_unloaded_stays_for_those_that_have_it(engine: FakeEngine) -> None:
    async with engine.llm.stream("Hi", lora_request=SQL):
        await engine.llm.unload_lora("sql")
        assert await engine.llm.list_loras() == []
        assert len(lora_calls(engine.client)) == 1, "the core must keep it"
        with pytest.raises(LoRANotFoundError):
            await engine.llm.complete("Hi", ONE_TOKEN, lora_request=LoRARequest("sql"))
    assert engine.client.aborted == [engine.client.added[0].request_id]
    assert lora_calls(engine.client)[1:] == [("unload_lora", "sql#1")]


async def test_pieces_of_a_prompt_keep_what_is_unloaded_between_them(engine: FakeEngine) -> None:
    async def pieces() -> AsyncIterator[str]:
        yield "one"
        await engine.llm.unload_lora("sql")
        yield "two"

    async with (
        trio.open_nursery() as nursery,
        engine.llm.stream(pieces(), SamplingParams(max_tokens=1), lora_request=SQL) as outputs,
    ):
        nursery.start_soon(_answer_all, engine)
        texts = [output.outputs[0].text async for output in outputs]
        nursery.cancel_scope.cancel()
    assert [add.lora for add in engine.client.added] == ["sql#1", "sql#1"]
    assert texts
    assert lora_calls(engine.client)[-1] == ("unload_lora", "sql#1")


async def _answer_all(engine: FakeEngine) -> None:
    num_answered = 0
    while True:
        await trio.testing.wait_all_tasks_blocked()
        for add in engine.client.added[num_answered:]:
            engine.client.emit(add, "x", FinishReason.LENGTH)
            num_answered += 1
        await trio.sleep(0.001)


async def test_one_that_is_loaded_again_is_another_one(engine: FakeEngine) -> None:
    await engine.llm.load_lora(SQL)
    with pytest.raises(InvalidRequestError, match="lora_name must not be in use, got 'sql'"):
        await engine.llm.load_lora(SQL)
    with pytest.raises(InvalidRequestError, match="lora_name must not be in use"):
        await engine.llm.load_lora(attrs.evolve(SQL, lora_path="elsewhere"))
    async with engine.llm.stream("Hi", lora_request=SQL):
        await engine.llm.load_lora(attrs.evolve(SQL, lora_path="elsewhere", load_inplace=True))
        assert await run_one(engine, LoRARequest("sql")) == "sql#2"
        assert ("unload_lora", "sql#1") not in engine.client.calls
    assert ("unload_lora", "sql#1") in engine.client.calls
    (adapter,) = await engine.llm.list_loras()
    assert (adapter.name, adapter.path) == ("sql", "elsewhere")


async def test_a_failed_reload_leaves_the_old_one(engine: FakeEngine) -> None:
    await engine.llm.load_lora(SQL)
    engine.client.answers["load_lora"] = [False, "damaged"]
    with pytest.raises(InvalidRequestError, match="damaged"):
        await engine.llm.load_lora(attrs.evolve(SQL, load_inplace=True))
    assert await run_one(engine, LoRARequest("sql")) == "sql#1"


async def test_a_load_that_is_cancelled_is_undone(engine: FakeEngine) -> None:
    engine.client.answers["load_lora"] = trio.Event()
    with trio.move_on_after(0.01) as scope:
        await engine.llm.load_lora(SQL)
    assert scope.cancelled_caught
    assert lora_calls(engine.client)[-1] == ("unload_lora", "sql#1")
    assert await engine.llm.list_loras() == []


async def test_one_that_is_unloaded_before_the_request_is_sent(engine: FakeEngine) -> None:
    await engine.llm.load_lora(SQL)
    long_text = "x" * 100 + " " * 4000  # tokenized in a thread
    async with trio.open_nursery() as nursery:

        async def submit() -> None:
            with pytest.raises((LoRANotFoundError, InvalidRequestError)):
                await engine.llm.complete(long_text, ONE_TOKEN, lora_request=LoRARequest("sql"))

        nursery.start_soon(submit)
        nursery.start_soon(engine.llm.unload_lora, "sql")
    assert engine.client.added == []
    assert engine.llm.num_open_requests == 0


# Cores that start


async def test_adapters_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_with_adapters(tmp_path, monkeypatch, lora_modules=["sql=adapters/sql"]) as engine:
        assert await run_one(engine, LoRARequest("sql")) == "sql#1"
        assert lora_calls(engine.client) == []


async def test_a_start_with_an_adapter_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineStartError, match="lora_modules: There is no LoRA adapter in missing"):
        async with open_hash_llm(tmp_path, monkeypatch, enable_lora=True, lora_modules=["a=missing"]):
            pass


async def test_a_new_core_gets_the_adapters_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    cores = Cores()
    restarting = {"engine_restart": "on-failure", "open_core": cores.open}
    async with open_with_adapters(tmp_path, monkeypatch, lora_modules=["a=1", "b=2"], **restarting) as engine:
        await engine.llm.load_lora(LoRARequest("c", 1, "3"))
        await engine.llm.load_lora(LoRARequest("d", 1, "4"))
        await engine.llm.unload_lora("b")
        assert cores.told == [["a#1", "b#2"]]
        cores.gate, cores.failing = trio.Event(), {"c#3": "its directory is gone"}
        cores.clients[0].die()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(EngineRestartingError):
            await engine.llm.load_lora(LoRARequest("e", 1, "5"))
        await trio.sleep(2)  # the core is starting
        await engine.llm.unload_lora("d")
        cores.gate.set()
        await engine.llm.wait_ready()
        assert cores.told[1] == ["a#1", "c#3", "d#4"]
        assert lora_calls(cores.clients[1]) == [("unload_lora", "d#4")]
        assert [adapter.name for adapter in await engine.llm.list_loras()] == ["a"]
        engine = FakeEngine(engine.llm, cores.clients[1])  # noqa: PLW2901
        assert await run_one(engine, LoRARequest("a")) == "a#1"
        with pytest.raises(LoRANotFoundError):
            await engine.llm.complete("Hi", lora_request=LoRARequest("c"))


# In a core


async def test_the_core_refuses_what_it_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_hash_llm(tmp_path, monkeypatch, enable_lora=True, lora_modules=["a=1"]) as engine:
        assert engine.runner.adapters == {"a#1"}
        await engine.llm.complete("Hi", ONE_TOKEN, lora_request=LoRARequest("a"))
        (adapter,) = await engine.llm.list_loras()
        adapter.key = "other"
        with pytest.raises(InvalidRequestError, match="There is no LoRA adapter 'other'"):
            await engine.llm.complete("Hi", ONE_TOKEN, lora_request=LoRARequest("a"))


async def test_weights_go_once_the_step_and_the_request_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_hash_llm(tmp_path, monkeypatch, enable_lora=True) as engine:
        await engine.llm.load_lora(LoRARequest("a", 1, "1"))
        with engine.steps_held():
            async with engine.llm.stream(
                "Hello", SamplingParams(max_tokens=20), lora_request=LoRARequest("a")
            ):
                await engine.wait_begun()
                await engine.llm.unload_lora("a")
            await engine.llm.check_health()  # the core has read all that it was told
            assert engine.runner.adapters == {"a#1"}, "the step that runs has it"
        await engine.until(lambda: not engine.runner.adapters)


async def test_prefixes_of_other_adapters_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cached(lora_request: LoRARequest | None) -> int:
        output = await engine.llm.complete("a prompt of some blocks", ONE_TOKEN, lora_request=lora_request)
        return output.num_cached_tokens

    async with open_hash_llm(tmp_path, monkeypatch, enable_lora=True) as engine:
        a, b = LoRARequest("a", 1, "1"), LoRARequest("b", 2, "2")
        assert [await cached(request) for request in (None, a, b)] == [0, 0, 0]
        assert [await cached(request) for request in (None, a, b)] == [20, 20, 20]
        await engine.llm.load_lora(attrs.evolve(a, load_inplace=True))
        assert await cached(a) == 0
        await engine.llm.unload_lora("b")
        assert await cached(b) == 0


# Places in a step


def running(driver: Driver) -> list[int]:
    return [request_id for request_id, _, _ in driver.step()]


def test_others_pass_who_waits_for_a_place() -> None:
    driver = Driver(max_loras=1, max_num_seqs=4, max_num_batched_tokens=64)
    first = driver.add([1, 2], max_tokens=4, ignore_eos=True, lora="a")
    driver.step()
    waits = driver.add([3, 4], max_tokens=2, ignore_eos=True, lora="b")
    plain = driver.add([5, 6], max_tokens=2, ignore_eos=True)
    same = driver.add([7, 8], max_tokens=2, ignore_eos=True, lora="a")
    assert running(driver) == [first, plain, same]
    assert driver.core.take_stats().is_full
    while driver.core.has_work:
        assert set(running(driver)) <= {first, plain, same} or not driver.live & {first, same}
    assert waits in driver.finished


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
def test_an_adapter_that_is_always_in_use_keeps_no_place_for_ever(policy: str) -> None:
    driver = Driver(max_loras=1, max_num_seqs=3, max_num_batched_tokens=64, policy=policy)
    driver.add([1, 2], max_tokens=4, lora="a")
    driver.step()
    waits = driver.add([3, 4], max_tokens=2, lora="b")
    for count in range(100):
        driver.add([5, 6 + count % 20], max_tokens=4, lora="a")
        driver.step()
        if waits in driver.finished:
            break
    assert waits in driver.finished
    assert count < 30
    driver.drain()
