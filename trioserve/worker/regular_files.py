"""Reading files that others may be writing, replacing or faking."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_regular_file"]


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """All of it. Never waits for a writer, as opening a pipe would; nor is the file mapped, as one that
    somebody cuts short meanwhile would then end the process.

    Raises:
      OSError: it cannot be read, is no regular file, or has more than `max_bytes` (EFBIG).
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        content = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
    if max(status.st_size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
