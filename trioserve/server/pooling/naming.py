"""Which field of a request an error is about, where the engine knows prompts only."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trioserve.errors import InvalidRequestError
from trioserve.server.errors import rename

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["naming_prompts"]

_NUMBERED = re.compile(r"prompts\[(\d+)\]")


@contextmanager
def naming_prompts(field: str, name: Callable[[int], str] | None = None) -> Iterator[None]:
    """Errors of a prompt name `field`, which held it; of one among several, with its number there, or what
    `name` says to its number."""
    try:
        yield
    except InvalidRequestError as error:
        if error.parameter == "prompt":
            rename(error, {"prompt": field})
        elif found := _NUMBERED.fullmatch(error.parameter or ""):
            index = int(found[1])
            rename(error, {found[0]: f"{field}[{index}]" if name is None else name(index)})
        raise
