"""Plots of what `growth.py` has measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["draw"]

_SIZE = (6.4, 3.6)
"""Inches."""


def draw(results: Mapping[str, Any], directory: Path) -> None:
    """streams.svg and context.svg."""
    servers = results["servers"]
    directory.mkdir(parents=True, exist_ok=True)
    by_streams = {name: found["streams"] for name, found in servers.items()}
    _draw_lines(by_streams, "streams", directory / "streams.svg")
    by_context = {
        f"{name}, {count} stream{'s' * (count != '1')}": rates
        for name, found in servers.items()
        for count, rates in found["context"].items()
    }
    _draw_lines(by_context, "tokens before", directory / "context.svg")


def _draw_lines(lines: Mapping[str, Mapping[str, float]], abscissa: str, path: Path) -> None:
    """Both axes logarithmic: a constant exponent is a straight line, a cliff is a kink."""
    import matplotlib as mpl  # noqa: PLC0415  # a tool of this benchmark alone
    from matplotlib import pyplot  # noqa: PLC0415

    # Text stays text, and the same figures give the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "growth"})
    figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    ticks: set[int] = set()
    for name, rates in lines.items():
        points = [int(count) for count in rates]
        axes.plot(points, list(rates.values()), marker="o", label=name)
        ticks.update(points)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(ticks), [f"{tick:,}" for tick in sorted(ticks)])
    axes.set_xlabel(abscissa)
    axes.set_ylabel("tokens/s")
    axes.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
