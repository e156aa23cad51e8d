"""Ctrl-C at every checkpoint of a call of the offline API, and at the moments that matter to an engine."""

from __future__ import annotations

import itertools
import signal
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import attrs
import pytest
import trio

from cancel_everywhere import RESUMING, WAITING, Coverage, Moment
from cancel_report import tell
from cancel_worlds import BEAMS, CoreWorld, ScriptedWorld, open_hash_llm, sampling
from hash_pooling import HashPoolingRunner, PoolingWorld, open_hash_pooling_llm
from trioserve.llm import LLM
from trioserve.llm_engine import LLMEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trioserve.async_llm import AsyncLLM

PROMPTS = ["Once upon", "a time"]


class InterruptAt(trio.abc.Instrument):
    """Sends Ctrl-C to the main thread at a checkpoint of the calls that it has made. Set between calls."""

    def __init__(self) -> None:
        self.num_left = 0
        """Checkpoints until then; 0: never."""
        self.moment = WAITING

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self.moment.as_it_waits:
            self._count(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.moment.as_it_waits:
            self._count(task)

    def _count(self, task: trio.lowlevel.Task) -> None:
        if self.num_left and _is_call(task):
            self.num_left -= 1
            if not self.num_left:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _is_call(task: trio.lowlevel.Task | None) -> bool:
    """A call's task, or one below it."""
    while task is not None and not task.name.endswith("_Call.run"):
        task = None if task.parent_nursery is None else task.parent_nursery.parent_task
    return task is not None


@attrs.frozen
class Offline:
    llm: LLM
    interrupt: InterruptAt
    worlds: list[Any]
    """One: a `ScriptedWorld` or a `CoreWorld`."""

    def find_leaks(self) -> dict[str, object]:
        world = self.worlds[0]
        engine = self.llm._engine
        # First, and at once: an answer that nobody wants ends by itself before long.
        levels = {
            "running": engine._portal.call(world.num_running),
            "unfinished": engine.get_num_unfinished_requests(),
        }
        if isinstance(world, CoreWorld | PoolingWorld):
            engine._portal.call(world.rest)
        return {**{what: n for what, n in levels.items() if n}, **engine._portal.call(world.find_leaks)}


@contextmanager
def open_offline(open_world: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[Offline]:
    interrupt, worlds = InterruptAt(), list[Any]()

    @asynccontextmanager
    async def open_llm() -> AsyncIterator[AsyncLLM]:
        async with open_world() as world:
            worlds.append(world)
            trio.lowlevel.add_instrument(interrupt)
            yield world.llm

    with LLM.from_engine(LLMEngine(cast("AsyncLLM", open_llm()))) as llm:
        yield Offline(llm, interrupt, worlds)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offline]:
    with open_offline(lambda: ScriptedWorld.open(tmp_path, monkeypatch)) as opened:
        yield opened


@pytest.fixture
def over_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offline]:
    @asynccontextmanager
    async def open_world() -> AsyncIterator[CoreWorld]:
        async with open_hash_llm(tmp_path, monkeypatch) as llm:
            yield CoreWorld(llm, is_process=False)

    with open_offline(open_world) as opened:
        yield opened


@pytest.fixture
def over_a_core_that_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offline]:
    @asynccontextmanager
    async def open_world() -> AsyncIterator[PoolingWorld]:
        async with open_hash_pooling_llm(tmp_path, monkeypatch, HashPoolingRunner(), max_num_seqs=2) as llm:
            yield PoolingWorld(llm)

    with open_offline(open_world) as opened:
        yield opened


def embed(llm: LLM) -> object:
    return [output.outputs.embedding for output in llm.embed(PROMPTS * 3, use_tqdm=False)]


def score(llm: LLM) -> object:
    return [output.outputs.score for output in llm.score("once", PROMPTS * 2, use_tqdm=False)]


def generate(llm: LLM) -> object:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, sampling(), use_tqdm=False)]


def enqueue_and_wait(llm: LLM) -> object:
    llm.enqueue(PROMPTS, sampling())
    return [output.outputs[0].text for output in llm.wait_for_completion(use_tqdm=False)]


def beam_search(llm: LLM) -> object:
    return [output.sequences[0].output_text for output in llm.beam_search(PROMPTS, BEAMS)]


def sleep_and_wake(llm: LLM) -> object:
    llm.sleep(1, "wait")
    llm.wake_up()
    return "awake"


KINDS: list[Callable[[LLM], object]] = [generate, enqueue_and_wait, beam_search, sleep_and_wake]


def interrupt_everywhere(kind: Callable[[LLM], object], moment: Moment, offline: Offline) -> Coverage:
    expected = kind(offline.llm)
    coverage = Coverage(f"offline: {kind.__name__}", moment.name)
    offline.interrupt.moment = moment
    for number in itertools.count(1):
        offline.interrupt.num_left = number
        try:
            assert kind(offline.llm) == expected
        except KeyboardInterrupt:
            coverage.num_checkpoints += 1
            coverage.num_surfaced += 1
        was_struck, offline.interrupt.num_left = not offline.interrupt.num_left, 0
        assert not offline.find_leaks(), f"checkpoint {number}"
        if not was_struck:
            break
    assert coverage.num_checkpoints == number - 1 > 0
    return coverage


@pytest.mark.parametrize("moment", [WAITING, RESUMING], ids=lambda moment: moment.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_ctrl_c_at_every_checkpoint(
    kind: Callable[[LLM], object],
    moment: Moment,
    offline: Offline,
    record_property: Callable[[str, object], None],
) -> None:
    tell(record_property, "script", [interrupt_everywhere(kind, moment, offline)])


@pytest.mark.parametrize("moment", [WAITING, RESUMING], ids=lambda moment: moment.name)
@pytest.mark.parametrize("kind", [generate, enqueue_and_wait, sleep_and_wake], ids=lambda kind: kind.__name__)
def test_ctrl_c_at_every_checkpoint_over_a_core(
    kind: Callable[[LLM], object],
    moment: Moment,
    over_a_core: Offline,
    record_property: Callable[[str, object], None],
) -> None:
    tell(record_property, "core, in process", [interrupt_everywhere(kind, moment, over_a_core)])
    assert over_a_core.llm.reset_prefix_cache(), "a block is held"


@pytest.mark.parametrize("moment", [WAITING, RESUMING], ids=lambda moment: moment.name)
@pytest.mark.parametrize("kind", [embed, score], ids=lambda kind: kind.__name__)
def test_ctrl_c_at_every_checkpoint_over_a_core_that_pools(
    kind: Callable[[LLM], object],
    moment: Moment,
    over_a_core_that_pools: Offline,
    record_property: Callable[[str, object], None],
) -> None:
    found = interrupt_everywhere(kind, moment, over_a_core_that_pools)
    tell(record_property, "pooling core, in process", [found])


@pytest.mark.parametrize("event", ["the first is added", "the last is added", "a step", "the last step"])
def test_ctrl_c_as_the_engine_acts(event: str, offline: Offline) -> None:
    expected = generate(offline.llm)
    client = offline.worlds[0].client
    num_before = len(client.added)

    def interrupt_if(happens: bool) -> None:
        if happens:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    add, emit_step = client.add, client.emit_step

    def watched_add(request: Any) -> None:
        add(request)
        place = {"the first is added": 1, "the last is added": len(PROMPTS)}.get(event)
        interrupt_if(len(client.added) - num_before == place)

    def watched_emit(updates: Any, **options: Any) -> None:
        emit_step(updates, **options)
        interrupt_if(event == ("the last step" if updates else "a step"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "add", watched_add)
        patch.setattr(client, "emit_step", watched_emit)
        with pytest.raises(KeyboardInterrupt):
            generate(offline.llm)
    assert not offline.find_leaks()
    assert generate(offline.llm) == expected
