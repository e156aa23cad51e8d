"""What a server's processes hold, and what its metrics say, over time."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import attrs

__all__ = ["Sample", "children_of", "read_metrics", "sample"]

_METRIC = re.compile(r"^trioserve:(?P<name>\w+)(?:\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)


@attrs.frozen(kw_only=True)
class Sample:
    """Of the API process, and of the engine core's, which is 0 while there is none."""

    rss_mib: float
    fds: int
    threads: int
    engine_rss_mib: float
    engine_fds: int
    engine_threads: int


def sample(pid: int) -> Sample:
    engine = next(iter(children_of(pid)), None)
    rss, fds, threads = _holdings(pid)
    engine_rss, engine_fds, engine_threads = (0.0, 0, 0) if engine is None else _holdings(engine)
    return Sample(
        rss_mib=rss,
        fds=fds,
        threads=threads,
        engine_rss_mib=engine_rss,
        engine_fds=engine_fds,
        engine_threads=engine_threads,
    )


def children_of(pid: int) -> list[int]:
    try:
        tasks = list((Path("/proc") / str(pid) / "task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def _holdings(pid: int) -> tuple[float, int, int]:
    """MiB resident, open files, threads; zeros where the process is gone."""
    directory = Path("/proc") / str(pid)
    try:
        status = dict(re.findall(r"^(\w+):\s+(\d+)", (directory / "status").read_text(), re.MULTILINE))
        return (
            int(status.get("VmRSS", 0)) / 1024,
            len(list((directory / "fd").iterdir())),
            int(status["Threads"]),
        )
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0, 0, 0


def read_metrics(port: int, key: str) -> dict[str, float]:
    """By name, summed over labels. Blocks."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read().decode()
    totals: dict[str, float] = {}
    for match in _METRIC.finditer(text):
        totals[match["name"]] = totals.get(match["name"], 0.0) + float(match["value"])
    return totals
