"""Every kind of request, cancelled at every checkpoint, over an engine that is a script."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from cancel_everywhere import ABORTING, LEAVING, RESUMING, WAITING, cancel_everywhere
from cancel_http import BACKGROUND, HTTP, WITHOUT_SEED, HttpKind, open_site
from cancel_kinds import LIBRARY, NAMED, Kind
from cancel_report import tell
from cancel_worlds import ScriptedWorld

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Record = Callable[[str, object], None]

ENGINE = "script"


@pytest.mark.parametrize("kind", LIBRARY, ids=lambda kind: kind.name)
async def test_in_a_library(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    moments = (WAITING, RESUMING, ABORTING) if kind in NAMED else (WAITING, RESUMING)
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        expected = await kind.expected(world)
        run = partial(kind.run, world)
        tell(
            record_property, ENGINE, await cancel_everywhere(kind.name, world, run, expected, moments=moments)
        )


async def test_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        run = partial(BACKGROUND.run, world)
        moments = (WAITING, RESUMING, ABORTING)
        expected = await BACKGROUND.expected(world)
        tell(
            record_property,
            ENGINE,
            await cancel_everywhere(BACKGROUND.name, world, run, expected, moments=moments),
        )


@pytest.mark.parametrize("kind", [*HTTP, *WITHOUT_SEED], ids=lambda kind: kind.name)
async def test_over_http(
    kind: HttpKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world, open_site(world.llm) as site:
        expected = await kind.expected(world)
        ask = partial(site.ask, kind)
        moments = (WAITING, RESUMING, LEAVING)
        found = await cancel_everywhere(f"HTTP: {kind.name}", world, ask, expected, moments=moments)
        tell(record_property, ENGINE, found)
