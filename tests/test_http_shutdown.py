"""Shutdown in three phases, and the application's lifespan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from hypercorn.utils import LifespanFailureError, LifespanTimeoutError

from helpers_http import DEADLINE, Client, Probe, Server, get, serving, start_stream
from helpers_tls import Authority

if TYPE_CHECKING:
    from pathlib import Path


async def wait_returned(server: Server) -> None:
    with trio.fail_after(DEADLINE):
        await server.returned.wait()


async def test_an_idle_server_returns_at_once(probe: Probe) -> None:
    async with serving(probe.app, keep_alive_timeout=1000.0) as server:
        fresh = await server.connect()
        used = await server.connect()
        await used.send(get("/hello"))
        await used.read_reply()
        server.shutdown.set()
        assert await fresh.read_to_end() == b""
        assert await used.read_to_end() == b""
        await wait_returned(server)


async def test_running_requests_go_on_and_new_connections_are_refused(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await start_stream(server, "/stream/gate")
        expected = probe.gate.let(1)
        await client.read_head()
        assert await client.read_chunk() == expected
        server.shutdown.set()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ConnectionRefusedError):
            await server.connect()
        assert not server.returned.is_set()
        expected = probe.gate.let(1)
        assert await client.read_chunk() == expected
        probe.gate.end()
        assert await client.read_chunk() == b""
        assert await client.read_to_end() == b""
        await wait_returned(server)


async def assert_refused(client: Client) -> None:
    reply = await client.read_reply()
    assert reply.status == 503
    assert reply.headers["connection"] == "close"
    assert int(reply.headers["retry-after"]) > 0
    assert reply.error == {
        "message": "The server is shutting down.",
        "type": "server_error",
        "param": None,
        "code": "shutting_down",
    }
    assert await client.read_to_end() == b""


async def test_a_further_request_on_a_live_connection_gets_503(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await start_stream(server, "/stream/gate")
        frames = probe.gate.let(1)
        await client.read_head()
        await client.read_chunk()
        server.shutdown.set()
        await trio.testing.wait_all_tasks_blocked()
        await client.send(get("/hello"))
        await trio.testing.wait_all_tasks_blocked(0.01)
        probe.gate.end()
        assert await client.read_chunk() == b""
        await assert_refused(client)
        await wait_returned(server)
    assert frames


async def test_an_empty_line_after_a_body_is_no_further_request(probe: Probe) -> None:
    async with serving(probe.app, keep_alive_timeout=1000.0) as server:
        client = await server.connect()
        await client.send(get("/stream/gate", "content-length: 3") + b"abc\r\n")
        await probe.entered.wait()
        server.shutdown.set()
        await trio.testing.wait_all_tasks_blocked()
        probe.gate.end()
        await client.read_to_end()
        await wait_returned(server)


async def test_a_request_whose_head_has_begun_gets_503(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(get("/hello")[:10])
        await trio.testing.wait_all_tasks_blocked(0.01)
        server.shutdown.set()
        await trio.testing.wait_all_tasks_blocked()
        await client.send(get("/hello")[10:])
        await assert_refused(client)
        await wait_returned(server)


async def test_a_response_that_begins_in_the_drain_announces_the_close(probe: Probe) -> None:
    release = trio.Event()

    @probe.app.get("/later")
    async def later() -> str:
        probe.entered.set()
        await release.wait()
        return "late"

    async with serving(probe.app) as server:
        client = await start_stream(server, "/later")
        await probe.entered.wait()
        server.shutdown.set()
        await trio.testing.wait_all_tasks_blocked()
        release.set()
        reply = await client.read_reply()
        assert (reply.body, reply.headers["connection"]) == (b"late", "close")
        await wait_returned(server)


@pytest.mark.parametrize("path", ["/wait", "/stream/gate", "/stream/flood"])
async def test_what_outlasts_the_drain_is_cancelled(probe: Probe, path: str) -> None:
    async with serving(probe.app, shutdown_timeout=0.1) as server:
        await start_stream(server, path, receive_buffer=4096)
        await probe.entered.wait()
        server.shutdown.set()
        await wait_returned(server)
        assert probe.left.is_set()


async def test_the_drain_through_tls(probe: Probe, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(probe.app, certificates=authority.certificates()) as server:
        idle = await server.connect(tls=authority.client())
        client = await server.connect(tls=authority.client())
        await client.send(get("/stream/gate"))
        expected = probe.gate.let(1)
        await client.read_head()
        assert await client.read_chunk() == expected
        server.shutdown.set()
        assert await idle.read_to_end() == b""
        await client.send(get("/hello"))
        await trio.testing.wait_all_tasks_blocked(0.01)
        expected = probe.gate.let(1)
        assert await client.read_chunk() == expected
        probe.gate.end()
        assert await client.read_chunk() == b""
        await assert_refused(client)
        await wait_returned(server)


@pytest.mark.parametrize("path", ["/wait", "/stream/flood"])
async def test_what_outlasts_the_drain_is_cancelled_through_tls(
    probe: Probe, path: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    async with serving(probe.app, certificates=authority.certificates(), shutdown_timeout=0.1) as server:
        client = await server.connect(4096, tls=authority.client())
        await client.send(get(path))
        await probe.entered.wait()
        server.shutdown.set()
        await wait_returned(server)
        assert probe.left.is_set()


async def test_cancelling_the_server_cancels_requests(probe: Probe) -> None:
    async with serving(probe.app) as server:
        await start_stream(server, "/wait")
        await probe.entered.wait()
    assert probe.left.is_set()
    assert server.listener.fileno() == -1


# Lifespan


def lifespan_app(lifespan):
    async def app(scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(scope, receive, send)
        else:
            state = scope["state"].get("model", "none").encode()
            headers = [(b"content-length", b"%d" % len(state))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": state})

    return app


async def test_lifespan_surrounds_the_serving() -> None:
    seen = []

    async def lifespan(scope, receive, send) -> None:
        seen.append((await receive())["type"])
        scope["state"]["model"] = "loaded"
        await send({"type": "lifespan.startup.complete"})
        seen.append((await receive())["type"])
        await send({"type": "lifespan.shutdown.complete"})

    async with serving(lifespan_app(lifespan)) as server:
        assert (await server.ask(get("/"))).body == b"loaded"
        server.shutdown.set()
        await wait_returned(server)
    assert seen == ["lifespan.startup", "lifespan.shutdown"]


async def test_an_application_without_lifespan_is_served() -> None:
    async def lifespan(scope, receive, send) -> None:
        await trio.lowlevel.checkpoint()
        raise NotImplementedError

    async with serving(lifespan_app(lifespan)) as server:
        assert (await server.ask(get("/"))).body == b"none"
        server.shutdown.set()
        await wait_returned(server)


def surfaces(kind: type[Exception], text: str):
    return pytest.RaisesGroup(pytest.RaisesExc(kind, match=text), flatten_subgroups=True)


async def test_a_failed_start_surfaces() -> None:
    async def lifespan(scope, receive, send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    with surfaces(LifespanFailureError, "no model"):
        async with serving(lifespan_app(lifespan)):
            pytest.fail("it must not be served")


async def test_a_failed_start_of_quart_surfaces(probe: Probe) -> None:
    @probe.app.before_serving
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("no engine")

    with surfaces(LifespanFailureError, "no engine"):
        async with serving(probe.app):
            pytest.fail("it must not be served")


async def test_a_lifespan_that_dies_ends_the_server() -> None:
    die = trio.Event()

    async def lifespan(scope, receive, send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await die.wait()
        raise RuntimeError("engine died")

    with surfaces(RuntimeError, "engine died"):
        async with serving(lifespan_app(lifespan)) as server:
            assert (await server.ask(get("/"))).status == 200
            die.set()
            await trio.sleep_forever()


async def test_a_shutdown_that_does_not_end_surfaces() -> None:
    async def lifespan(scope, receive, send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await trio.sleep_forever()

    with surfaces(LifespanTimeoutError, "shutdown"):
        async with serving(lifespan_app(lifespan), shutdown_timeout=0.1) as server:
            server.shutdown.set()
            await trio.sleep_forever()
