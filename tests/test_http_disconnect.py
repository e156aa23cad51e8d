"""A client that leaves, in any way and at any moment, ends its request."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from fake_engine import FakeEngine, open_fake_llm
from helpers_http import DEADLINE, Client, Probe, Server, get, post, serving
from trioserve.link.messages import Add
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app
from trioserve.server.request_scope import App, request_stack

if TYPE_CHECKING:
    from pathlib import Path

    import quart

LEAVING = {"close": Client.close, "half_close": Client.half_close, "reset": Client.reset}


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


# The real application


def completion(**fields: Any) -> bytes:
    body = {"prompt": "ab", "max_tokens": 100, **fields}
    return post("/v1/completions", json.dumps(body).encode(), "content-type: application/json")


@attrs.define
class Stage:
    """The real application over an engine that the test plays, and a neighbour in the middle of a stream."""

    fake: FakeEngine
    app: App
    server: Server
    neighbour: Client
    neighbours_add: Add
    num_scopes: int = 0
    """Of requests that have begun and not ended, the neighbour's not counted."""
    hold_answers: bool = False
    """Between the handler and the body."""

    @classmethod
    async def set(cls, fake: FakeEngine, app: App, server: Server) -> Stage:
        neighbour = await server.connect()
        await neighbour.send(completion(stream=True))
        (add,) = await added(fake, 1)
        fake.client.emit(add, "a")
        await neighbour.read_head()
        assert b'"a"' in await neighbour.read_chunk()
        stage = cls(fake, app, server, neighbour, add)
        app.before_request(stage._enter)
        app.after_request(stage._hold)
        return stage

    async def _enter(self) -> None:
        def leave() -> None:
            self.num_scopes -= 1

        self.num_scopes += 1
        request_stack().callback(leave)

    async def _hold(self, response: quart.Response) -> quart.Response:
        if self.hold_answers:
            await trio.sleep_forever()
        return response

    async def submit(self, client: Client, **fields: Any) -> list[Add]:
        """A request of this client that has come to the engine, as so many sequences."""
        await client.send(completion(**fields))
        return (await added(self.fake, 1 + fields.get("n", 1)))[1:]

    async def check_only_the_neighbour_is_left(self, expected_aborts: list[Add]) -> None:
        await until(lambda: not self.num_scopes and self.fake.llm.num_open_requests == 1)
        assert self.fake.client.aborted == [add.request_id for add in expected_aborts]
        assert len(self.fake.client.added) == 1 + len(expected_aborts)
        self.fake.client.emit(self.neighbours_add, "b", FinishReason.LENGTH)
        with trio.fail_after(DEADLINE):
            assert b'"b"' in await self.neighbour.read_chunk()
            while await self.neighbour.read_chunk():
                pass
        assert self.fake.llm.num_open_requests == 0


async def added(fake: FakeEngine, count: int) -> list[Add]:
    await until(lambda: len(fake.client.added) >= count)
    return fake.client.added


async def until(condition: Any) -> None:
    with trio.fail_after(DEADLINE):
        while not condition():
            await trio.testing.wait_all_tasks_blocked()


# Each brings a client to a moment, and gives the sequences that the engine has of it.


async def before_the_headers_are_complete(stage: Stage, client: Client) -> list[Add]:
    await client.send(completion()[:30])
    await trio.testing.wait_all_tasks_blocked()
    return []


async def in_the_middle_of_the_body(stage: Stage, client: Client) -> list[Add]:
    await client.send(completion()[:-1])
    await until(lambda: stage.num_scopes)
    return []


async def queued(stage: Stage, client: Client) -> list[Add]:
    return await stage.submit(client, n=3)


async def prefilling(stage: Stage, client: Client) -> list[Add]:
    adds = await stage.submit(client)
    stage.fake.client.emit(adds[0])  # a step that computed a part of the prompt
    await trio.testing.wait_all_tasks_blocked()
    return adds


async def before_the_first_token(stage: Stage, client: Client) -> list[Add]:
    return await stage.submit(client, n=2, stream=True)


async def between_handler_and_body(stage: Stage, client: Client) -> list[Add]:
    stage.hold_answers = True
    adds = await stage.submit(client, stream=True)
    stage.fake.client.emit(adds[0], "x")
    await trio.testing.wait_all_tasks_blocked()
    return adds


async def idle_in_a_stream(stage: Stage, client: Client) -> list[Add]:
    adds = await stage.submit(client, stream=True)
    stage.fake.client.emit(adds[0], "x")
    await client.read_head()
    assert b'"x"' in await client.read_chunk()
    return adds


async def while_a_token_is_sent(stage: Stage, client: Client) -> list[Add]:
    adds = await idle_in_a_stream(stage, client)
    for _ in range(5):
        stage.fake.client.emit(adds[0], "y")
    return adds


async def blocked_in_a_write(stage: Stage, client: Client) -> list[Add]:
    adds = await stage.submit(client, stream=True, n=8)
    for _ in range(60):  # about 1.6 KB each, into buffers of about 10 KB; what comes later is merged
        for add in adds:
            stage.fake.client.emit(add, "x")
        await trio.testing.wait_all_tasks_blocked()
    return adds


async def pipelined_behind_a_running_request(stage: Stage, client: Client) -> list[Add]:
    adds = await stage.submit(client)
    await client.send(completion(stream=True) + get("/v1/models"))
    await trio.testing.wait_all_tasks_blocked()
    return adds


MOMENTS = {
    moment.__name__: moment
    for moment in (
        before_the_headers_are_complete,
        in_the_middle_of_the_body,
        queued,
        prefilling,
        before_the_first_token,
        between_handler_and_body,
        idle_in_a_stream,
        while_a_token_is_sent,
        blocked_in_a_write,
        pipelined_behind_a_running_request,
    )
}


def small_listener() -> socket.socket:
    """Its connections buffer little, so that writes block soon."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_exactly_the_leavers_sequences_are_aborted(fake: FakeEngine, leaving: str, moment: str) -> None:
    app = create_app(fake.llm)
    async with serving(app, listener=small_listener()) as server:
        stage = await Stage.set(fake, app, server)
        client = await server.connect(receive_buffer=4096)
        adds = await MOMENTS[moment](stage, client)
        assert not fake.client.aborted
        assert stage.num_scopes == (moment != "before_the_headers_are_complete")
        LEAVING[leaving](client)
        if moment == "before_the_headers_are_complete" and leaving == "half_close":
            assert await client.read_to_end() == b""
        await stage.check_only_the_neighbour_is_left(adds)
