"""Which layers share a block table. Imports no torch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LayerGroups", "group_layers"]


@attrs.frozen(kw_only=True)
class LayerGroups:
    """A model's layers, cut into groups of `size` that see equally far back; a group may be partly filled."""

    size: int
    windows: tuple[int | None, ...]
    """One per group; those that see everything come first."""
    places: tuple[tuple[int, int], ...]
    """Of each layer: its group, and its place within the group, below `size`."""


def group_layers(windows: Sequence[int | None]) -> LayerGroups:
    """Group layers by their windows (one entry per layer).

    The size is the rarest window's number of layers, or down to half of it if that leaves fewer places empty:
    far smaller groups would leave fewer still, and need many block tables. 15 layers with a window and 3
    without make 6 groups of 3, 22 and 4 make 7 groups of 4, two places of which are empty.
    """
    counts = Counter(windows)
    rarest = min(counts.values())
    candidates = range(rarest, rarest // 2, -1)
    size = min(candidates, key=lambda size: sum(-count % size for count in counts.values()))
    found: list[int | None] = []
    places: dict[int, tuple[int, int]] = {}
    for window in sorted(counts, key=lambda w: (w is not None, w)):
        layers = [layer for layer, other in enumerate(windows) if other == window]
        for start in range(0, len(layers), size):
            for place, layer in enumerate(layers[start : start + size]):
                places[layer] = (len(found), place)
            found.append(window)
    return LayerGroups(
        size=size, windows=tuple(found), places=tuple(places[layer] for layer in range(len(windows)))
    )
