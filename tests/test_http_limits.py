"""How many connections a server takes, and how large the headers may be."""

from __future__ import annotations

import logging
import resource
import socket
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from helpers_http import Client, Probe, Server, get, serving
from helpers_tls import Authority
from trioserve import ServerArgs
from trioserve.server.connection_room import ConnectionRoom, raise_file_limit, room_for_files
from trioserve.server.http import HttpLimits

if TYPE_CHECKING:
    from pathlib import Path


async def hold(server: Server) -> Client:
    """A connection that is there, and has been seen."""
    client = await server.connect()
    await client.send(get("/hello"))
    assert (await client.read_reply()).status == 200
    return client


async def assert_turned_away(client: Client, status: int, kind: str, code: str) -> None:
    reply = await client.read_reply()
    assert (reply.status, reply.error["type"], reply.error["code"]) == (status, kind, code)
    assert reply.error["message"]
    assert int(reply.headers["retry-after"]) > 0
    assert reply.headers["connection"] == "close"
    assert reply.headers["content-type"] == "application/json"
    assert await client.read_to_end() == b""


@pytest.mark.parametrize(
    ("limit", "reason", "status", "kind", "code"),
    [
        ("max_connections", "connections", 503, "server_error", "overloaded"),
        ("max_connections_per_address", "address_connections", 429, "requests", "rate_limit_exceeded"),
    ],
)
async def test_a_connection_too_many_is_turned_away(
    probe: Probe,
    limit: str,
    reason: str,
    status: int,
    kind: str,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused: list[str] = []
    async with serving(probe.app, count_refusal=refused.append, **{limit: 2}) as server:
        first, second = await hold(server), await hold(server)
        for _ in range(3):
            await assert_turned_away(await server.connect(), status, kind, code)
        await first.send(get("/hello"))  # who is in stays in
        assert (await first.read_reply()).body == b"hello"
        second.close()
        await trio.testing.wait_all_tasks_blocked(0.01)
        await hold(server)
        await assert_turned_away(await server.connect(), status, kind, code)
    assert refused == [reason] * 4
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


async def test_connections_that_are_turned_away_hide_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope, receive, send) -> None:
        raise RuntimeError("a bug")

    async with serving(app, max_connections=1) as server:
        client = await server.connect()
        for _ in range(20):
            await (await server.connect()).read_to_end()
        await client.send(get("/"))
        assert (await client.read_reply()).status == 500
    assert "a bug" in caplog.text


async def test_one_that_is_turned_away_may_have_sent_its_request(probe: Probe) -> None:
    async with serving(probe.app, max_connections=1) as server:
        await hold(server)
        for _ in range(20):
            client = await server.connect()
            await client.send(get("/echo"))
            with trio.fail_after(5):
                assert (await client.read_head())[0] == 503
        assert not probe.entered.is_set()


async def test_through_tls_it_is_closed_without_a_word(probe: Probe, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(probe.app, certificates=authority.certificates(), max_connections=1) as server:
        client = await server.connect(tls=authority.client())
        late = await server.connect()
        assert await late.read_to_end() == b""
        await client.send(get("/hello"))
        assert (await client.read_reply()).body == b"hello"


async def test_a_connection_that_fails_gives_its_place_back(probe: Probe, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(probe.app, certificates=authority.certificates(), max_connections=1) as server:
        for _ in range(5):
            client = await server.connect()
            await client.send(b"no TLS")
            assert await client.read_to_end() == b""
            await trio.testing.wait_all_tasks_blocked(0.01)
        await server.connect(tls=authority.client())


async def test_unix_sockets_have_no_address(probe: Probe, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    async with serving(probe.app, listener=listener, max_connections_per_address=1) as server:
        for _ in range(3):
            await hold(server)


def test_who_is_the_same_client() -> None:
    def are_one(first: str, second: str) -> bool:
        room = ConnectionRoom(max_per_address=1)
        with room.place((first, 1)) as nothing, room.place((second, 2)) as refusal:
            assert nothing is None
            return refusal is not None

    assert are_one("192.0.2.1", "192.0.2.1")
    assert not are_one("192.0.2.1", "192.0.2.2")
    assert are_one("2001:db8:1:2::1", "2001:db8:1:2:ffff::2")
    assert not are_one("2001:db8:1:2::1", "2001:db8:1:3::1")
    assert are_one("fe80::1%eth0", "fe80::2%eth0")
    assert are_one("::ffff:192.0.2.1", "::ffff:192.0.2.1")
    assert not are_one("::ffff:192.0.2.1", "::ffff:192.0.2.2")


def test_nothing_is_kept_of_clients_that_are_gone() -> None:
    room = ConnectionRoom(max_connections=2, max_per_address=1)
    for n in range(100):
        with room.place((f"192.0.2.{n}", 1)), room.place((f"192.0.2.{n}", 2)) as refusal:
            assert refusal is not None
            assert refusal.status == 429
    assert room.num_open == 0
    assert not room._of_client


async def test_headers_may_be_as_long_as_is_said(probe: Probe) -> None:
    limits = HttpLimits.from_args(ServerArgs(max_header_size=2000))
    async with serving(probe.app, max_header_bytes=limits.max_header_bytes) as server:
        assert (await server.ask(get("/hello", f"x-own: {'a' * 1800}"))).status == 200
        client = await server.connect()
        await client.send(get("/hello", f"x-own: {'a' * 2100}")[:-4])
        reply = await client.read_reply()
        assert reply.status == 431
        assert "2000 bytes" in reply.error["message"]


def test_limits_are_those_of_the_arguments() -> None:
    args = ServerArgs(
        max_connections=7,
        max_connections_per_address=3,
        max_header_size=2048,
        max_body_size=5,
        keep_alive_timeout=1.5,
        write_timeout=2.5,
        shutdown_timeout=3.5,
    )
    assert HttpLimits.from_args(args) == HttpLimits(
        max_connections=7,
        max_connections_per_address=3,
        max_header_bytes=2048,
        max_body_size=5,
        keep_alive_timeout=1.5,
        write_timeout=2.5,
        shutdown_timeout=3.5,
    )


@pytest.fixture
def file_limit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("file_limit")
def test_without_a_limit_there_are_as_many_connections_as_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    limit = HttpLimits.from_args(ServerArgs()).max_connections
    assert limit is not None
    assert 300 < limit < 600
    assert limit == room_for_files()
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert HttpLimits.from_args(ServerArgs(max_connections=5)).max_connections == 5
