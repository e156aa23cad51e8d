"""Every kind of transcription, cancelled at every checkpoint: as it is uploaded, decoded, heard, answered."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from cancel_everywhere import ABORTING, LEAVING, RESUMING, WAITING, cancel_everywhere
from cancel_hearing import HEARD_IN_A_LIBRARY, HEARD_OVER_HTTP, open_hearing_world
from cancel_http import open_site
from cancel_report import tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cancel_http import HttpKind
    from cancel_kinds import Kind

    Record = Callable[[str, object], None]

ENGINE = "script that hears"


@pytest.mark.parametrize("kind", HEARD_IN_A_LIBRARY, ids=lambda kind: kind.name)
async def test_in_a_library(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    moments = (WAITING, RESUMING, ABORTING)
    async with open_hearing_world(tmp_path, monkeypatch) as world:
        run = partial(kind.run, world)  # type: ignore[arg-type]  # its kinds ask no more of a world
        expected = await kind.expected(world)  # type: ignore[arg-type]
        tell(
            record_property, ENGINE, await cancel_everywhere(kind.name, world, run, expected, moments=moments)
        )


@pytest.mark.parametrize("kind", HEARD_OVER_HTTP, ids=lambda kind: kind.name)
async def test_over_http(
    kind: HttpKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    async with open_hearing_world(tmp_path, monkeypatch) as world, open_site(world.llm) as site:
        ask, expected = partial(site.ask, kind), await kind.expected(world)
        moments = (WAITING, RESUMING, LEAVING)
        found = await cancel_everywhere(f"HTTP: {kind.name}", world, ask, expected, moments=moments)
        tell(record_property, ENGINE, found)
