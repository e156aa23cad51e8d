"""What `cancel_everywhere` has covered, as a table at the end of a test run.

`python tests/cancel_report.py` runs those tests and nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cancel_everywhere import Coverage

__all__ = ["pytest_terminal_summary", "table", "tell"]

_PROPERTY = "cancel_everywhere"


@attrs.frozen
class Row:
    """One kind on one engine, with what was covered at each moment."""

    engine: str
    kind: str
    moments: dict[str, tuple[int, int, int]] = attrs.field(factory=dict)
    """Checkpoints, and how often the cancellation surfaced, and how often the request was complete."""


def tell(record_property: Callable[[str, object], None], engine: str, coverages: Iterable[Coverage]) -> None:
    """Note, with a test's fixture, what was covered. It also reaches the main process of pytest-xdist."""
    for coverage in coverages:
        record_property(_PROPERTY, [engine, *attrs.astuple(coverage)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    rows = _rows(value for report in reports for name, value in report.user_properties if name == _PROPERTY)
    if rows:
        terminalreporter.section("cancelled at every checkpoint")
        for line in table(rows):
            terminalreporter.write_line(line)


def _rows(values: Iterable[Sequence[object]]) -> list[Row]:
    rows: dict[tuple[str, str], Row] = {}
    for engine, kind, moment, *counts in values:
        row = rows.setdefault((str(engine), str(kind)), Row(str(engine), str(kind)))
        row.moments[str(moment)] = tuple(counts)  # type: ignore[assignment]  # as they came from `tell`
    return sorted(rows.values(), key=lambda row: row.engine)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown. A cell: checkpoints (cancellations that surfaced + requests that were complete)."""
    moments = list(dict.fromkeys(moment for row in rows for moment in row.moments))
    yield _line(["engine", "kind", *moments, "all cancelled"])
    yield _line(["---"] * (len(moments) + 3))
    for row in rows:
        cells = [_cell(row.moments.get(moment)) for moment in moments]
        complete = all(sum(counts[1:]) == counts[0] > 0 for counts in row.moments.values())
        yield _line([row.engine, row.kind, *cells, "yes" if complete else "NO"])
    total = sum(counts[0] for row in rows for counts in row.moments.values())
    yield f"{total} runs, each cancelled at a checkpoint of its own."


def _cell(counts: tuple[int, int, int] | None) -> str:
    return "-" if counts is None else "{} ({} + {})".format(*counts)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    tests = sorted(map(str, Path(__file__).parent.glob("test_cancel_requests_*.py")))
    sys.exit(pytest.main(["-q", *tests]))
