"""How long work on a model's files is shown to whoever waits for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from tqdm import tqdm

__all__ = ["Progress", "SilentProgress", "TerminalProgress"]

Advance = Callable[[int], object]
"""Tells a bar that so many more bytes are done."""


class Progress(Protocol):
    """Called from the thread that resolves the model."""

    @property
    def visible(self) -> bool:
        """Whether other programs (pip, the hub client) are to show their own progress."""

    def note(self, message: str) -> None:
        """One line that says what happens now."""

    def bar(self, description: str, total: int) -> AbstractContextManager[Advance]:
        """A bar over `total` bytes, closed with the context."""


class _Bar(tqdm):  # type: ignore[misc]  # tqdm is not typed
    # tqdm would start a thread that redraws stalled bars, and never end it.
    monitor_interval = 0


class TerminalProgress:
    """Lines and tqdm bars on stderr; the bars only where stderr is a terminal."""

    visible = True

    def note(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def bar(self, description: str, total: int) -> Iterator[Advance]:
        # disable=None: shown on a terminal only.
        with _Bar(desc=description, total=total, unit="B", unit_scale=True, disable=None) as bar:
            yield bar.update


class SilentProgress:
    """Shows nothing."""

    visible = False

    def note(self, message: str) -> None:
        pass

    def bar(self, description: str, total: int) -> AbstractContextManager[Advance]:
        return contextlib.nullcontext(lambda amount: None)
