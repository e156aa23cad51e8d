"""What goes wrong with the files of a batch."""

from __future__ import annotations

from trioserve.errors import TrioserveError

__all__ = ["BatchFileError"]


class BatchFileError(TrioserveError):
    """The input cannot be read, or the output cannot be written or is something else; the text says why."""
