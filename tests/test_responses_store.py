"""Stores of responses: bounds, owners, and a file that is still there after a restart."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from helpers_api import FakeLLM
from helpers_responses import PacedLLM, serving
from trioserve.errors import InvalidConfigError, InvalidRequestError
from trioserve.server.responses.event_log import EventLog
from trioserve.server.responses.memory_store import MemoryStore
from trioserve.server.responses.sqlite_store import open_sqlite_store
from trioserve.server.responses.store import (
    ResponseStore,
    StoredResponse,
    StoreLimits,
    UnknownResponseError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

LIMITS = StoreLimits(max_responses=100, max_bytes=10_000, ttl=1000)
Open = Callable[..., AbstractAsyncContextManager[ResponseStore]]


@pytest.fixture(params=["memory", "sqlite"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    @asynccontextmanager
    async def in_memory(**limits: Any) -> AsyncIterator[ResponseStore]:
        yield MemoryStore(attrs.evolve(LIMITS, **limits), trio.current_time)

    @asynccontextmanager
    async def in_file(**limits: Any) -> AsyncIterator[ResponseStore]:
        path = str(tmp_path / "responses.sqlite")
        # SQLite works in threads, where trio's clock is not known.
        token = trio.lowlevel.current_trio_token()
        clock = lambda: trio.from_thread.run_sync(trio.current_time, trio_token=token)  # noqa: E731
        async with open_sqlite_store(path, attrs.evolve(LIMITS, **limits), clock) as store:
            yield store

    return in_memory if request.param == "memory" else in_file


def kept(name: str, *, size: int = 10, owner: str = "me", previous: str | None = None) -> StoredResponse:
    text = b'{"id": "%s"}' % name.encode()
    items = b"[" + b" " * (size - len(text) - 2) + b"]"
    return StoredResponse(id=name, owner=owner, previous_id=previous, response=text, items=items)


async def found(store: ResponseStore, *ids: str) -> list[str]:
    return [name for name in ids if await store.get("me", name) is not None]


async def test_what_was_put_can_be_had(open_store: Open) -> None:
    async with open_store() as store:
        stored = attrs.evolve(kept("a"), events=b"event: x\n\n", first_event=7, is_open=True, previous_id="z")
        await store.put(stored)
        assert await store.get("me", "a") == stored
        newer = attrs.evolve(stored, is_open=False, response=b"{}")
        await store.put(newer)
        assert await store.get("me", "a") == newer


async def test_an_owner_has_only_its_own(open_store: Open) -> None:
    async with open_store() as store:
        await store.put(kept("a", owner="somebody"))
        assert await store.get("me", "a") is None
        assert await store.delete("me", "a") is False
        with pytest.raises(UnknownResponseError):
            await store.history("me", "a", 1000)
        assert await store.delete("somebody", "a") is True
        assert await store.get("somebody", "a") is None


async def test_the_number_is_bounded(open_store: Open) -> None:
    async with open_store(max_responses=2) as store:
        for name in "abc":
            await store.put(kept(name))
            await trio.sleep(0.001)
        assert await found(store, "a", "b", "c") == ["b", "c"]
        assert await found(store, "b") == ["b"]  # it was used last
        await store.put(kept("d"))
        assert await found(store, "b", "c", "d") == ["b", "d"]


async def test_the_bytes_are_bounded(open_store: Open) -> None:
    async with open_store(max_bytes=100) as store:
        await store.put(kept("a", size=40))
        await store.put(kept("b", size=60))
        assert await found(store, "a", "b") == ["a", "b"]
        await store.put(kept("c", size=41))
        assert await found(store, "a", "b", "c") == ["c"] or await found(store, "c") == ["c"]
        await store.put(kept("d", size=101))  # it is not kept, and nothing goes for its sake
        assert await found(store, "c", "d") == ["c"]
        await store.put(kept("c", size=101))
        assert await found(store, "c") == []


async def test_the_age_is_bounded(open_store: Open, autojump_clock: trio.testing.MockClock) -> None:
    async with open_store(ttl=60) as store:
        await store.put(kept("a"))
        await store.put(kept("b"))
        await trio.sleep(40)
        assert await found(store, "a") == ["a"]
        await trio.sleep(40)
        assert await found(store, "a", "b") == ["a"]
        await trio.sleep(61)
        assert await found(store, "a") == []


async def test_a_history_is_used_as_a_whole(open_store: Open) -> None:
    async with open_store(max_responses=3) as store:
        await store.put(kept("first"))
        await store.put(kept("second", previous="first"))
        await store.put(kept("other"))
        await trio.sleep(0.001)
        history = await store.history("me", "second", 1000)
        assert [stored.id for stored in history] == ["first", "second"]
        await store.put(kept("third", previous="second"))
        assert await found(store, "first", "second", "third", "other") == ["first", "second", "third"]
        await store.delete("me", "first")
        with pytest.raises(UnknownResponseError) as caught:
            await store.history("me", "third", 1000)
        assert caught.value.response_id == "first"


# The file


async def test_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    async with serving(responses_store=path) as api:
        first = (await api.create(input="One")).json
    assert os.stat(path).st_mode & 0o077 == 0
    async with serving(responses_store=path) as api:
        assert (await api.get(first["id"])).json == first
        assert (await api.create(input="Two", previous_response_id=first["id"])).status == 200
        assert [message["content"] for message in api.llm.rendered[-1]["messages"]] == [
            "One", "Hello, world", "Two",
        ]  # fmt: skip


async def test_events_are_there_after_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    async with serving(responses_store=path) as api:
        response_id = (await api.create(background=True)).json["id"]
        await api.background.wait_idle()
        body = (await api.get(response_id, "stream=true")).body
    async with serving(responses_store=path) as api:
        assert (await api.get(response_id, "stream=true")).body == body


async def test_what_a_killed_server_was_making_has_failed(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    async with serving(PacedLLM(), responses_store=path) as api:
        response = (await api.create(background=True)).json
        assert api.store is not None
        left = await api.store.get("address:127.0.0.1", response["id"])
        assert left is not None
        assert left.is_open
        await api.delete(response["id"])
        await api.store.put(left)  # as if nothing had been told of its end
    async with serving(responses_store=path) as api:
        found = (await api.get(response["id"])).json
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        reply = await api.get(response["id"], "stream=true")
        assert (reply.status, reply.error["param"]) == (400, "response_id")
        assert (await api.create(previous_response_id=response["id"])).status == 200


_CHILD = """
import sys, trio
from trioserve.server.responses.sqlite_store import open_sqlite_store
from trioserve.server.responses.store import StoredResponse, StoreLimits

async def main():
    limits = StoreLimits(max_responses=9, max_bytes=9999, ttl=9999)
    async with open_sqlite_store(sys.argv[1], limits) as store:
        for name, is_open in (("done", False), ("begun", True)):
            stored = dict(id=name, owner="me", previous_id=None, items=b"[]", is_open=is_open)
            await store.put(StoredResponse(response=b'{"status": "queued", "error": null}', **stored))
        print("put", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def fill_and_be_killed(path: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _CHILD, path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"put\n"
        child.kill()


async def test_a_server_that_is_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    await trio.to_thread.run_sync(fill_and_be_killed, path)
    async with open_sqlite_store(path, LIMITS) as store:
        done, begun = await store.get("me", "done"), await store.get("me", "begun")
        assert done is not None
        assert begun is not None
        assert b'"queued"' in done.response
        assert (begun.is_open, b'"failed"' in begun.response) == (False, True)


@pytest.mark.parametrize("path", ["memory", "file"])
async def test_a_long_conversation(path: str, tmp_path: Path) -> None:
    where = "memory" if path == "memory" else str(tmp_path / "responses.sqlite")
    async with serving(responses_store=where) as api:
        previous = None
        for number in range(60):
            made = await api.create(
                input=f"{number}", previous_response_id=previous, truncation="auto", max_output_tokens=8
            )
            assert made.status == 200, made.body
            previous = made.json["id"]
        assert api.store is not None
        history = await api.store.history("address:127.0.0.1", previous, 2**20)
        said = [json.loads(stored.items)[0]["content"][0]["text"] for stored in history]
        assert said == [str(number) for number in range(60)]


async def open_file(path: object) -> None:
    async with open_sqlite_store(str(path), LIMITS):
        pass


async def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    broken, foreign, newer = tmp_path / "broken", tmp_path / "foreign", tmp_path / "newer"
    broken.write_bytes(b"no database at all" * 100)
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    await open_file(newer)
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    for path in (broken, foreign, newer, tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(
            InvalidConfigError, match="responses_store must be memory, none or a file"
        ) as caught:
            await open_file(path)
        assert caught.value.field == "responses_store"
    assert broken.read_bytes().startswith(b"no database")


async def test_a_file_belongs_to_one_server(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    async with open_sqlite_store(str(path), LIMITS):
        with pytest.raises(InvalidConfigError, match="locked"):
            await open_file(path)
    await open_file(path)


async def test_an_application_alone_has_no_file(tmp_path: Path) -> None:
    from helpers_api import Client
    from trioserve.server_args import ServerArgs

    with pytest.raises(InvalidConfigError, match="responses_store must be memory or none"):
        Client(FakeLLM(), ServerArgs(responses_store=str(tmp_path / "x")))


async def test_a_store_that_fails_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "responses.sqlite")
    async with serving(responses_store=path) as api:
        api.store._file._connection.execute("DROP TABLE responses")  # type: ignore[union-attr]
        assert (await api.create()).json["status"] == "completed"
        assert "could not be stored" in caplog.text
        assert (await api.get("resp_1")).status == 500


# Events


def frame(number: int) -> bytes:
    return b"event: x\ndata: %d\n\n" % number


async def test_only_the_last_events_are_kept() -> None:
    log = EventLog(max_bytes=3 * len(frame(0)))
    log.append(map(frame, range(5)))
    assert (log.first, log.end) == (2, 5)
    with pytest.raises(InvalidRequestError, match="starting_after must be from 1 to 4"):
        log.follow(0)
    follower = log.follow(1)
    assert await follower.next_frame() == frame(2) + frame(3) + frame(4)
    log.append(map(frame, range(5, 9)))  # 5 goes before it is read
    last = await follower.next_frame()
    assert last is not None
    assert b"events_dropped" in last
    assert await follower.next_frame() is None


async def test_a_follower_waits_and_ends_with_the_log() -> None:
    log = EventLog()
    follower, got = log.follow(-1), []

    async def read() -> None:
        while (frames := await follower.next_frame()) is not None:
            got.append(frames)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for number in range(3):
            await trio.testing.wait_all_tasks_blocked()
            log.append([frame(number)])
        await trio.testing.wait_all_tasks_blocked()
        log.close()
    assert got == [frame(0), frame(1), frame(2)]


async def test_a_long_log_is_sent_in_pieces() -> None:
    big = b"event: x\ndata: " + b"y" * 40_000 + b"\n\n"
    log = EventLog.of_stored(big * 5, 0)
    follower = log.follow(-1)
    pieces = []
    while (piece := await follower.next_frame()) is not None:
        pieces.append(piece)
    assert len(pieces) == 5
    assert b"".join(pieces) == big * 5
