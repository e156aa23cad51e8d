"""What the output of an earlier run holds: lines that are answered need no second answer."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import attrs
import msgspec

from trioserve.batch.errors import BatchFileError
from trioserve.batch.line_reader import LineReader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EarlierResults", "digest_of", "read_results"]


def digest_of(custom_id: str) -> bytes:
    """What is remembered of a custom_id, however long it is: of a million lines, about 100 MB."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


@attrs.define(eq=False)
class EarlierResults:
    answered: set[bytes] = attrs.field(factory=set)
    """Digests of the custom_ids that have a result."""
    told: set[int] = attrs.field(factory=set)
    """Numbers of the lines that were no requests, and are told so."""
    num_good: int = 0
    num_errors: int = 0
    end: int = 0
    """Bytes of all whole lines."""
    is_ended: bool = True
    """An end of line follows the last one of them."""


@attrs.frozen
class _Reply:
    status_code: int


@attrs.frozen
class _WrongLine:
    line: int


@attrs.frozen
class _Result:
    """What is read of a `Result`."""

    id: str
    custom_id: str | None
    response: _Reply | None
    error: _WrongLine | None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == 200


async def read_results(fd: int, name: str, keep: Callable[[bytes], None] | None) -> EarlierResults:
    """Read a regular file from its beginning. A last line that was torn counts as not there.

    With `keep`, errors count as not there either, and that gets all other lines, each with its end of line.

    Raises:
      BatchFileError: `name` holds something else.
    """
    found = EarlierResults()
    reader = LineReader(fd)
    while (line := await reader.read()) is not None:
        content = line.content or b""
        try:
            result = msgspec.json.decode(content, type=_Result)
        except (msgspec.DecodeError, RecursionError):
            if not line.is_ended:
                break
            raise BatchFileError(
                f"{name} holds something else: its line {line.number} is no result of a batch. "
                "Name another output file."
            ) from None
        found.end, found.is_ended = line.start + len(content) + line.is_ended, line.is_ended
        if keep is None or result.is_good:
            _count(found, result)
        if keep is not None and result.is_good:
            keep(content + b"\n")
    return found


def _count(found: EarlierResults, result: _Result) -> None:
    if result.is_good:
        found.num_good += 1
    else:
        found.num_errors += 1
    if result.error is not None:
        found.told.add(result.error.line)
    elif result.custom_id is not None:
        found.answered.add(digest_of(result.custom_id))
