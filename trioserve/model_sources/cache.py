"""The cache on disk: where it is, and how a finished directory or file gets into it.

Everything in it can be made again, so it may be removed at any time that no trioserve starts. Nothing is
visible under its final name before it is complete: work goes on beside it, in `.partial-*`, and one rename
publishes it. Two processes that make the same entry both succeed; the first rename stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cache_root", "publish_directory", "publish_text"]

_PARTIAL = ".partial-"
_LEFTOVER_AGE = 24 * 3600.0
"""Seconds after which a partial directory is what a killed process left behind."""


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/trioserve`, by default `~/.cache/trioserve`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "trioserve"


@contextlib.contextmanager
def publish_directory(target: Path) -> Iterator[Path]:
    """Give an empty directory to fill; it becomes `target` when the block ends without an error.

    Where another process has published `target` in the meantime, its work is kept and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep_leftovers(target.parent)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes it private; the cache is readable like any other directory
        yield partial
        with contextlib.suppress(FileExistsError):
            _rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_text(target: Path, text: str) -> None:
    """Write a small file in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=_PARTIAL, dir=target.parent)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, target)


def _rename(partial: Path, target: Path) -> None:
    try:
        os.replace(partial, target)
    except OSError as error:
        # A directory never replaces one that is not empty: ENOTEMPTY or EEXIST, by file system.
        if target.is_dir():
            raise FileExistsError(target) from error
        raise


def _sweep_leftovers(directory: Path) -> None:
    oldest = time.time() - _LEFTOVER_AGE
    for leftover in directory.glob(_PARTIAL + "*"):
        with contextlib.suppress(OSError):  # another process may be sweeping too
            if leftover.stat().st_mtime < oldest:
                shutil.rmtree(leftover, ignore_errors=True)
