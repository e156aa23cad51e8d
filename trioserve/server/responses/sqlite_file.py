"""A file of responses. Blocking, and for one thread at a time."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import msgspec

from trioserve.server.responses.store import (
    HistoryTooLongError,
    StoredResponse,
    StoreLimits,
    UnknownResponseError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ResponseFile", "WrongFileError"]

_APPLICATION_ID = 0x74726F73
"""In SQLite's header: the file is ours."""
_VERSION = 1

_LOCK_TIMEOUT = 1.0
"""Seconds that a server waits for another one to let go of the file."""

_NAMES = ("id", "owner", "previous_id", "is_open", "first_event", "response", "items", "events")
_COLUMNS = ", ".join(_NAMES)
_COLUMNS_SAID = _COLUMNS.replace("events", "x''")
"""Without events, which are large, and which no history needs."""

_TABLE = """\
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    previous_id TEXT,
    is_open INTEGER NOT NULL,
    first_event INTEGER NOT NULL,
    size INTEGER NOT NULL,
    used REAL NOT NULL,
    response BLOB NOT NULL,
    items BLOB NOT NULL,
    events BLOB NOT NULL
)"""
_INDEX = "CREATE INDEX responses_by_use ON responses (used, size)"
"""With the size in it, the sum of sizes reads no responses."""

_SERVER_ENDED = {"code": "server_error", "message": "The server ended before the response did."}


class WrongFileError(Exception):
    """It is no file of responses, or of a version that is not known."""


@attrs.define(eq=False)
class ResponseFile:
    """The only connection to the file: nobody else can open it meanwhile.

    Every method may raise sqlite3.Error, and what it was to change is then as before.
    """

    _connection: sqlite3.Connection
    _limits: StoreLimits
    _now: Callable[[], float]

    @classmethod
    def open(cls, path: str, limits: StoreLimits, now: Callable[[], float]) -> ResponseFile:
        """Responses that were being made when the last server ended have failed from now on.

        Raises:
          OSError, sqlite3.Error, WrongFileError: the file cannot be used.
        """
        # Conversations are nobody else's business; SQLite's other files get the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(
            path, timeout=_LOCK_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        opened = cls(connection, limits, now)
        try:
            opened._prepare()
        except Exception:
            connection.close()
            raise
        return opened

    def close(self) -> None:
        self._connection.close()

    def put(self, stored: StoredResponse) -> None:
        """Keep it in the place of what has the same id, as far as the limits allow."""
        if stored.size > self._limits.max_bytes:
            self._delete(stored.id)
            return
        values = (*(getattr(stored, name) for name in _NAMES), stored.size, self._now())
        marks = ", ".join("?" * len(values))
        self._run(f"INSERT OR REPLACE INTO responses ({_COLUMNS}, size, used) VALUES ({marks})", *values)
        self._purge()

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._purge()
        return self._use(owner, response_id, _COLUMNS)

    def _use(self, owner: str, response_id: str, columns: str) -> StoredResponse | None:
        query = f"SELECT {columns} FROM responses WHERE id = ? AND owner = ?"
        row = self._run(query, response_id, owner).fetchone()
        if row is None:
            return None
        self._run("UPDATE responses SET used = ? WHERE id = ?", self._now(), response_id)
        values = dict(zip(_NAMES, row, strict=True))
        return StoredResponse(**values | {"is_open": bool(values["is_open"])})

    def history(self, owner: str, response_id: str, max_bytes: int) -> Sequence[StoredResponse]:
        """Raises UnknownResponseError if one of them is not there, or HistoryTooLongError."""
        self._purge()
        found: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            stored = self._use(owner, next_id, _COLUMNS_SAID)
            if stored is None:
                raise UnknownResponseError(next_id)
            found.append(stored)
            max_bytes -= stored.size_said
            if max_bytes < 0:
                raise HistoryTooLongError
            next_id = stored.previous_id
        return found[::-1]

    def delete(self, owner: str, response_id: str) -> bool:
        found = self.get(owner, response_id) is not None
        if found:
            self._delete(response_id)
        return found

    def _delete(self, response_id: str) -> None:
        self._run("DELETE FROM responses WHERE id = ?", response_id)

    def _purge(self) -> None:
        self._run("DELETE FROM responses WHERE used <= ?", self._now() - self._limits.ttl)
        while self._is_too_full():
            oldest = "SELECT rowid FROM responses ORDER BY used, rowid LIMIT 1"
            self._run(f"DELETE FROM responses WHERE rowid = ({oldest})")

    def _is_too_full(self) -> bool:
        number, size = self._run("SELECT count(*), total(size) FROM responses").fetchone()
        return bool(number > self._limits.max_responses or size > self._limits.max_bytes)

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _prepare(self) -> None:
        self._run("PRAGMA locking_mode = EXCLUSIVE")
        self._run("PRAGMA secure_delete = FAST")
        if self._pragma("journal_mode = WAL") != "wal":
            raise WrongFileError("it is on a file system that SQLite's WAL mode does not work on")
        self._run("PRAGMA synchronous = NORMAL")
        self._run("BEGIN IMMEDIATE")  # from now on the lock is held
        try:
            self._prepare_table()
            self._fail_open_ones()
        except Exception:
            self._run("ROLLBACK")
            raise
        self._run("COMMIT")
        self._purge()

    def _pragma(self, name: str) -> object:
        return self._run(f"PRAGMA {name}").fetchone()[0]

    def _prepare_table(self) -> None:
        (number,) = self._run("SELECT count(*) FROM sqlite_master").fetchone()
        if number == 0:
            self._run(_TABLE)
            self._run(_INDEX)
            self._run(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._run(f"PRAGMA user_version = {_VERSION}")
            return
        if self._pragma("application_id") != _APPLICATION_ID:
            raise WrongFileError("it is another program's database")
        if (version := self._pragma("user_version")) != _VERSION:
            raise WrongFileError(f"its version is {version}, and only {_VERSION} is known")

    def _fail_open_ones(self) -> None:
        for response_id, text in self._run("SELECT id, response FROM responses WHERE is_open").fetchall():
            response = msgspec.json.decode(text) | {"status": "failed", "error": _SERVER_ENDED}
            changes = "response = ?, is_open = 0"
            self._run(
                f"UPDATE responses SET {changes} WHERE id = ?", msgspec.json.encode(response), response_id
            )
