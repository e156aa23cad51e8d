"""A client that leaves, in any way and at any moment, ends its request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from fake_engine import open_fake_llm
from helpers_http import Client, Probe, Server, get, post, serving
from trioserve.server.app import create_app

if TYPE_CHECKING:
    from pathlib import Path

LEAVING = {"close": Client.close, "half_close": Client.half_close, "reset": Client.reset}


@pytest.fixture
def probe() -> Probe:
    return Probe()


async def begin(server: Server, probe: Probe, moment: str) -> Client:
    """A request, brought to the moment at which its client will leave."""
    client = await server.connect(receive_buffer=4096)
    path = {
        "waiting": "/wait",
        "idle": "/stream/gate",
        "sending": "/stream/trickle",
        "blocked": "/stream/flood",
    }
    await client.send(get(path[moment]))
    await probe.entered.wait()
    if moment in {"idle", "sending"}:
        probe.gate.let(1)
        await client.read_head()
        assert await client.read_chunk()
    if moment == "blocked":
        await client.read_head()
        await trio.testing.wait_all_tasks_blocked(0.02)
    return client


@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("moment", ["waiting", "idle", "sending", "blocked"])
@pytest.mark.parametrize("pipelined", [b"", get("/hello")], ids=["single", "pipelined"])
async def test_leaving_ends_the_request(probe: Probe, leaving: str, moment: str, pipelined: bytes) -> None:
    async with serving(probe.app) as server:
        client = await begin(server, probe, moment)
        if pipelined:
            await client.send(pipelined)
            await trio.testing.wait_all_tasks_blocked()
        assert not probe.left.is_set()
        LEAVING[leaving](client)
        await probe.wait_left()
        assert (await server.ask(get("/hello"))).body == b"hello"


async def test_leaving_in_the_middle_of_a_body_ends_the_request(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(b"POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\nhalf")
        await probe.entered.wait()
        client.close()
        await probe.wait_left()


async def test_sending_too_much_ahead_is_leaving(probe: Probe) -> None:
    async with serving(probe.app, max_pipelined_bytes=1000) as server:
        client = await server.connect()
        await client.send(get("/wait"))
        await probe.entered.wait()
        await client.send(get("/hello"))
        await trio.testing.wait_all_tasks_blocked()
        assert not probe.left.is_set()
        await client.send(get("/hello") * 100)
        await probe.wait_left()


async def test_an_asgi_application_that_ignores_messages_is_cancelled_too() -> None:
    entered, cancelled = trio.Event(), trio.Event()

    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        entered.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with serving(app) as server:
        client = await server.connect()
        await client.send(get("/"))
        await entered.wait()
        client.close()
        with trio.fail_after(5):
            await cancelled.wait()


async def test_an_application_may_go_on_after_its_response() -> None:
    release, done = trio.Event(), trio.Event()

    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        await release.wait()
        done.set()

    async with serving(app) as server:
        reply = await server.ask(get("/"))
        assert reply.body == b"ok"
        release.set()
        with trio.fail_after(5):
            await done.wait()


@pytest.mark.parametrize("leaving", LEAVING)
async def test_leaving_ends_a_beam_search_and_those_that_were_to_follow(
    leaving: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": ["ab", "cd"], "n": 3, "use_beam_search": True, "max_tokens": 4}
    request = post("/v1/completions", json.dumps(body).encode(), "content-type: application/json")
    async with (
        open_fake_llm(tmp_path, monkeypatch, strict=False) as fake,
        serving(create_app(fake.llm)) as server,
    ):
        client = await server.connect()
        await client.send(request)
        while not fake.client.added:
            await trio.testing.wait_all_tasks_blocked()
        LEAVING[leaving](client)
        while fake.llm.num_open_requests:
            await trio.testing.wait_all_tasks_blocked()
        assert fake.client.aborted == [add.request_id for add in fake.client.added]
        assert len(fake.client.added) == 1
