"""The engines of a server start and end side by side."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

import trioserve.async_llm
from byte_tokenizer import byte_model, save_byte_tokenizer
from fake_engine import FakeEngineClient
from trioserve.args import EngineArgs
from trioserve.cli.engines import make_engines, open_engines
from trioserve.errors import EngineDeadError, EngineStartError
from trioserve.nurseries import ungrouped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from trioserve.async_llm import AsyncLLM
    from trioserve.config import EngineConfig

NAMES = ("one", "two", "three")


class Cores:
    """Where the engines get their cores from."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        save_byte_tokenizer(directory)
        model = byte_model(str(directory), context_length=128)
        patch.setattr(trioserve.async_llm, "resolve_model", lambda _: model)
        patch.setattr(trioserve.async_llm, "open_client", self.open)
        self.starting = 0
        self.open_ones: dict[str, FakeEngineClient] = {}
        self.all_begin = trio.Event()
        self.fails: Callable[[str], bool] = lambda _: False

    @asynccontextmanager
    async def open(self, config: EngineConfig, *_: object) -> AsyncIterator[FakeEngineClient]:
        (name,) = config.model.served_model_names
        self.starting += 1
        if self.starting == len(NAMES):
            self.all_begin.set()
        await self.all_begin.wait()
        if self.fails(name):
            raise EngineStartError(f"{name} has no memory")
        client = self.open_ones[name] = FakeEngineClient()
        try:
            yield client
        finally:
            del self.open_ones[name]


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cores:
    return Cores(tmp_path, monkeypatch)


def engines() -> list[AsyncLLM]:
    return make_engines([EngineArgs.from_dict({"model": name, "log": {}}) for name in NAMES])


async def test_side_by_side(cores: Cores) -> None:
    """Each core waits until all others begin to start."""
    llms = engines()
    assert {llm.config.cache.num_engines for llm in llms} == {3}
    with trio.fail_after(5):
        async with open_engines(llms):
            assert cores.open_ones.keys() == set(NAMES)
            assert all(llm.is_running for llm in llms)
    assert not cores.open_ones


async def test_one_that_dies_leaves_the_others(cores: Cores) -> None:
    llms = engines()
    async with open_engines(llms):
        cores.open_ones["two"].die()
        await llms[1].wait_dead()
        assert [llm.is_running for llm in llms] == [True, False, True]
        with pytest.raises(EngineDeadError):
            llms[1].check_room()
        llms[2].check_room()


async def test_one_that_cannot_start_ends_all(cores: Cores, caplog: pytest.LogCaptureFixture) -> None:
    cores.fails = lambda name: name == "two"
    with pytest.raises(EngineStartError, match="two has no memory"), ungrouped():
        async with open_engines(engines()):
            raise AssertionError("not all are there")
    assert not cores.open_ones
    assert "two cannot be served" in caplog.text


async def test_who_leaves_while_they_start_leaves_nothing(cores: Cores) -> None:
    cores.starting = -100
    with trio.move_on_after(0.05) as scope:
        async with open_engines(engines()):
            raise AssertionError("none is there")
    assert scope.cancelled_caught
    assert not cores.open_ones


@pytest.mark.parametrize("error", [KeyError("of the body"), None])
async def test_whatever_ends_the_body_ends_all(cores: Cores, error: Exception | None) -> None:
    with pytest.raises(KeyError) if error else trio.CancelScope() as scope, ungrouped():
        async with open_engines(engines()):
            if error is not None:
                raise error
            assert isinstance(scope, trio.CancelScope)
            scope.cancel()
            await trio.sleep_forever()
    assert not cores.open_ones
