"""Every kind of request, cancelled at every checkpoint, over one engine process with a real model.

The engine is started once, answers have three tokens, each kind is cancelled at one moment (over HTTP, by its
client's leaving), and kinds that differ only in the frontend are left to the cheaper engines: so this takes a
minute. Every checkpoint of what is run here is struck.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest

from cancel_controls import CONTROLS, DONE, Control, ControlledWorld
from cancel_everywhere import LEAVING, WAITING, Coverage, Moment, Scenario, cancel_everywhere
from cancel_http import HTTP, HttpKind, open_site
from cancel_kinds import LIBRARY, Kind
from cancel_report import tell
from cancel_worlds import CoreWorld
from served import MODEL, STEADY
from trioserve import AsyncLLM, EngineArgs
from trioserve.portal import Portal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Record = Callable[[str, object], None]

ENGINE = "process, SmolLM2"

IN_LIBRARY = {
    "complete",
    "stream, deltas",
    "stream, n=3",
    "stream, logprobs and a stop string",
    "submit and release",
    "beam search",
    "streaming input",
    "several in an embedder's scope",
    "one of two siblings",
}
OVER_HTTP = {
    "chat",
    "chat, stream, n=3",
    "chat, structured",
    "completion, stream",
    "completion, beam search",
}
OF_CONTROLS = {"pause, keep", "sleep 2, keep", "wake up", "drain"}


@attrs.frozen
class Engine:
    portal: Portal
    llm: AsyncLLM

    @property
    def world(self) -> CoreWorld:
        return CoreWorld(self.llm, is_process=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    args = EngineArgs.from_dict({"model": MODEL, "dtype": STEADY, "threads": 1, "log": {"stats_interval": 0}})
    with Portal() as portal:
        yield Engine(portal, portal.enter(AsyncLLM.from_engine_args(args)))


async def cover_kind(world: CoreWorld, kind: Kind) -> list[Coverage]:
    return await cover(kind.name, world, partial(kind.run, world), await kind.expected(world), WAITING)


async def cover_http(world: CoreWorld, kind: HttpKind) -> list[Coverage]:
    expected = await kind.expected(world)
    async with open_site(world.llm) as site:
        return await cover(f"HTTP: {kind.name}", world, partial(site.ask, kind), expected, LEAVING)


async def cover_control(world: ControlledWorld, control: Control) -> list[Coverage]:
    return await cover(f"control: {control.name}", world, partial(control.run, world), DONE, WAITING)


async def cover(
    kind: str, world: CoreWorld, scenario: Scenario, expected: object, moment: Moment
) -> list[Coverage]:
    found = await cancel_everywhere(kind, world, scenario, expected, moments=[moment], runs_are_costly=True)
    assert await world.llm.reset_prefix_cache(), "a block is held"
    return found


@pytest.mark.parametrize("kind", [k for k in LIBRARY if k.name in IN_LIBRARY], ids=lambda kind: kind.name)
def test_in_a_library(kind: Kind, engine: Engine, record_property: Record) -> None:
    tell(record_property, ENGINE, engine.portal.call(cover_kind, engine.world, kind))


@pytest.mark.parametrize("kind", [k for k in HTTP if k.name in OVER_HTTP], ids=lambda kind: kind.name)
def test_over_http(kind: HttpKind, engine: Engine, record_property: Record) -> None:
    tell(record_property, ENGINE, engine.portal.call(cover_http, engine.world, kind))


@pytest.mark.parametrize(
    "control", [c for c in CONTROLS if c.name in OF_CONTROLS], ids=lambda control: control.name
)
def test_controls(control: Control, engine: Engine, record_property: Record) -> None:
    world = ControlledWorld(engine.llm, is_process=True)
    tell(record_property, ENGINE, engine.portal.call(cover_control, world, control))
