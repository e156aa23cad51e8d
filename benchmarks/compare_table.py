"""The table of `compare.py`: medians, and how ours stand to the better of the others."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Run = Mapping[str, Any]

__all__ = ["tables"]

OURS = "trioserve"


@attrs.frozen
class Row:
    title: str
    path: tuple[str, ...]
    """Where a run has the figure."""
    form: str
    better: str = "more"
    """Or "less"; "": there is nothing to compare."""


ROWS = [
    *(
        Row(f"{count} stream{'s' * (count > 1)}, tokens/s", (f"streams_{count}", "tokens_per_second"), ".0f")
        for count in (1, 8, 32)
    ),
    Row("prefill, 8 x 1,024 tokens, tokens/s", ("prefill", "prompt_tokens_per_second"), ".0f"),
    Row("TTFT p50 at 32 streams, ms", ("streams_32", "ttft_ms_p50"), ".0f", "less"),
    Row("between tokens at 32 streams, p50, ms", ("streams_32", "gap_ms_p50"), ".1f", "less"),
    Row("between tokens at 32 streams, p99, ms", ("streams_32", "gap_ms_p99"), ".1f", "less"),
    Row("between tokens at 32 streams, p99 / p50", ("streams_32", "gap_p99_of_p50"), ".2f", ""),
    Row("1,000 tokens of prefix: first TTFT, ms", ("prefix", "first_ttft_ms"), ".0f", "less"),
    Row("second TTFT, ms", ("prefix", "second_ttft_ms"), ".0f", "less"),
    Row("second of first", ("prefix", "second_of_first"), ".2f", ""),
    Row("start to ready, warm, s", ("ready_seconds",), ".1f", "less"),
    Row("start to ready, cold, s", ("cold_ready_seconds",), ".1f", "less"),
    Row("memory of all processes (PSS), MiB", ("memory_mib",), ".0f", "less"),
    Row("client's share of a processor at 32", ("streams_32", "client_cpu_share"), ".2f", ""),
    Row("events per token at 32", ("streams_32", "events_per_token"), ".2f", ""),
]


def tables(runs: Iterable[Run]) -> str:
    """One per precision. In brackets: the least and the most of the rounds."""
    by_precision: dict[str, list[Run]] = {}
    for run in runs:
        by_precision.setdefault(run["precision"], []).append(run)
    return "\n\n".join(_table(precision, some) for precision, some in by_precision.items())


def _table(precision: str, runs: Sequence[Run]) -> str:
    servers = list(dict.fromkeys(run["server"] for run in runs))
    servers.sort(key=lambda server: not server.startswith(OURS))
    ours = [server for server in servers if server.startswith(OURS)]
    compared = ours if len(ours) < len(servers) else []
    heads = [precision, *servers, *(f"{server} / better peer" for server in compared)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in ROWS:
        values = {server: _values(runs, server, row) for server in servers}
        if any(values.values()):
            cells = [_cell(values[server], row) for server in servers]
            lines.append(_line([row.title, *cells, *(_ratio(values, server, row) for server in compared)]))
    num_rounds = max(sum(run["server"] == server for run in runs) for server in servers)
    return "\n".join([*lines, "", f"Medians of {num_rounds} rounds (least to most)."])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _values(runs: Iterable[Run], server: str, row: Row) -> list[float]:
    """Of each round in which it was measured."""
    found = []
    for run in runs:
        value: Any = run
        for key in row.path:
            value = value.get(key) if value is not None else None
        if run["server"] == server and value is not None:
            found.append(float(value))
    return found


def _cell(values: Sequence[float], row: Row) -> str:
    if not values:
        return "-"
    middle, least, most = (
        format(value, row.form) for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least} to {most})" if len(values) > 1 else middle


def _ratio(values: Mapping[str, Sequence[float]], server: str, row: Row) -> str:
    peers = [statistics.median(some) for name, some in values.items() if some and not name.startswith(OURS)]
    if not row.better or not peers or not values[server]:
        return ""
    best = max(peers) if row.better == "more" else min(peers)
    # Gaps are 0 where events wait for the client, on a machine that others keep busy.
    return f"{statistics.median(values[server]) / best:.2f}" if best else "-"
