"""Responses in an SQLite file: they are there again after a restart."""

from __future__ import annotations

import sqlite3
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import attrs
import trio

from trioserve.errors import InvalidConfigError
from trioserve.server.responses.sqlite_file import ResponseFile, WrongFileError
from trioserve.server.responses.store import StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from trioserve.server.responses.store import StoredResponse, StoreLimits

__all__ = ["SQLiteStore", "open_sqlite_store"]

P = ParamSpec("P")
T = TypeVar("T")


@asynccontextmanager
async def open_sqlite_store(
    path: str, limits: StoreLimits, now: Callable[[], float] = time.time
) -> AsyncIterator[SQLiteStore]:
    """The file, which is made if there is none, and is nobody else's while it is open.

    Raises:
      InvalidConfigError: it cannot be used, or another server uses it.
    """
    try:
        file = await trio.to_thread.run_sync(ResponseFile.open, path, limits, now)
    except (OSError, sqlite3.Error, WrongFileError) as error:
        raise InvalidConfigError(
            f"responses_store must be memory, none or a file of responses that no other server uses, "
            f"got {path!r}: {error}.",
            field="responses_store",
        ) from None
    try:
        yield SQLiteStore(file)
    finally:
        file.close()  # some milliseconds: what was written is copied out of the log


@attrs.define(eq=False)
class SQLiteStore:
    """A `ResponseStore`. Each call is one in a thread, one at a time; its end is waited for also by who is
    cancelled, which takes milliseconds."""

    _file: ResponseFile
    _limiter: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    async def put(self, stored: StoredResponse) -> None:
        await self._call(self._file.put, stored)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return await self._call(self._file.get, owner, response_id)

    async def history(self, owner: str, response_id: str, max_bytes: int) -> Sequence[StoredResponse]:
        return await self._call(self._file.history, owner, response_id, max_bytes)

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._call(self._file.delete, owner, response_id)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)
        except sqlite3.Error as error:
            raise StoreError(f"the file of responses: {error}") from error
