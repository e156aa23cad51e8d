"""Errors as a terminal shows them."""

from __future__ import annotations

__all__ = ["one_line"]


def one_line(error: BaseException) -> str:
    """The first paragraph of an error's text; what follows (a traceback of the engine core) is for logs."""
    return " ".join(str(error).partition("\n\n")[0].split())
