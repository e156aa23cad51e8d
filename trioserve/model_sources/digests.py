"""sha256 of files, remembered so that a file that did not change is read once."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from trioserve.model_sources.cache import cache_root, publish_text

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.model_sources.progress import Progress

__all__ = ["file_digest"]

_CHUNK = 2**20


def file_digest(path: Path, progress: Progress) -> str:
    """The hex sha256 of a file's bytes.

    Remembered in the cache by path, size, modification time and inode: a file with all four the same is
    taken to be the same file.
    """
    memo = cache_root() / "digests" / _identity(path)
    try:
        return memo.read_text(encoding="utf-8")
    except FileNotFoundError:
        digest = _compute(path, progress)
        publish_text(memo, digest)
        return digest


def _identity(path: Path) -> str:
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()


def _compute(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with (
        path.open("rb") as file,
        progress.bar(f"Checking {path.name}", path.stat().st_size) as advance,
    ):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
