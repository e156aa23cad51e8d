"""A WebSocket is a scope: it ends with its client, its server, or a peer that does not keep up."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from helpers_http import DEADLINE, Client, get, serving
from helpers_websocket import BINARY, CLOSE, PING, TEXT, WebsocketProbe, frame, handshake, open_websocket

LEAVING = {"close": Client.close, "half_close": Client.half_close, "reset": Client.reset}


@pytest.mark.parametrize("leaving", [*LEAVING, "frame"])
@pytest.mark.parametrize("path", ["/wait", "/echo", "/take", "/flood"])
async def test_leaving_ends_the_handler(path: str, leaving: str) -> None:
    probe = WebsocketProbe()
    async with serving(probe.app) as server:
        client = await open_websocket(server, path, receive_buffer=4096)
        await probe.entered.wait()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert (probe.open, probe.left.is_set()) == (1, False)
        if leaving == "frame":
            await client.send(frame(CLOSE))
        else:
            LEAVING[leaving](client.client)
        await probe.wait_left()
        await trio.testing.wait_all_tasks_blocked()
        assert probe.open == 0
        assert (await server.ask(get("/hello"))).body == b"hello"


async def test_leaving_before_the_handshake_is_through() -> None:
    probe = WebsocketProbe()

    @probe.app.websocket("/slow")
    async def slow() -> None:
        probe._enter()
        await trio.sleep_forever()

    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(handshake("/slow"))
        await probe.entered.wait()
        client.close()
        await probe.wait_left()


async def test_leaving_in_the_middle_of_a_frame() -> None:
    probe = WebsocketProbe()
    async with serving(probe.app) as server:
        client = await open_websocket(server, "/take")
        await client.send(frame(BINARY, b"half", length=100))
        await trio.testing.wait_all_tasks_blocked(0.01)
        client.client.close()
        await probe.wait_left()
    assert probe.taken == []


async def test_a_client_that_does_not_read_is_dropped(autojump_clock: trio.testing.MockClock) -> None:
    autojump_clock.autojump_threshold = 0.01
    probe = WebsocketProbe()
    async with serving(probe.app, write_timeout=2.0, websocket_ping_interval=0.0) as server:
        begun = trio.current_time()
        await open_websocket(server, "/flood", receive_buffer=4096)
        await probe.wait_left()
        assert trio.current_time() - begun == pytest.approx(2.0, abs=0.5)


async def test_a_flood_waits_for_the_application() -> None:
    probe = WebsocketProbe()
    message = frame(BINARY, bytes(20_000))
    sent = 0

    async def flood(client: Client) -> None:
        nonlocal sent
        while True:
            await client.send(message)
            sent += 1

    async with serving(probe.app) as server:
        client = await open_websocket(server, "/take")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood, client.client)
            await trio.testing.wait_all_tasks_blocked(0.05)
            before = sent  # what the kernel's buffers and ours hold
            for _ in range(2 * before + 20):
                probe.take.release()
            await probe.wait_taken(before + 20)
            assert sent > before
            nursery.cancel_scope.cancel()


async def test_a_flood_of_pings_is_bounded() -> None:
    """A client that sends pings and reads no pongs loses pongs, and nothing else."""
    probe = WebsocketProbe()
    async with serving(probe.app, websocket_ping_interval=0.0) as server:
        client = await open_websocket(server, "/take", receive_buffer=4096)
        for _ in range(40):
            await client.send(frame(PING, bytes(125)) * 1000)
        await client.text("after")
        probe.take.release()
        await probe.wait_taken(1)
    assert probe.taken == ["after"]


async def test_a_client_whose_messages_wait_is_not_taken_for_dead(
    autojump_clock: trio.testing.MockClock,
) -> None:
    autojump_clock.autojump_threshold = 0.01
    probe = WebsocketProbe()
    async with serving(
        probe.app, websocket_ping_interval=2.0, websocket_ping_timeout=2.0, max_body_size=10**6
    ) as server:
        client = await open_websocket(server, "/take")
        await client.send(frame(BINARY, bytes(70_000)) * 2 + frame(TEXT, b"more"))
        await trio.sleep(20)
        assert not probe.left.is_set()
        for _ in range(3):
            probe.take.release()
            await trio.testing.wait_all_tasks_blocked(0.005)
    assert probe.taken == [bytes(70_000), bytes(70_000), "more"]


async def test_a_shutdown_tells_the_handler() -> None:
    probe = WebsocketProbe()
    async with serving(probe.app) as server:
        client = await open_websocket(server, "/until-drained")
        await probe.entered.wait()
        server.shutdown.set()
        assert await client.message() == "last words"
        assert await client.closing() == (1001, "going")
        client.client.close()
        with trio.fail_after(DEADLINE):
            await server.returned.wait()


async def test_a_shutdown_ends_what_does_not_end_itself() -> None:
    probe = WebsocketProbe()
    async with serving(probe.app, shutdown_timeout=0.05) as server:
        client = await open_websocket(server, "/echo")
        await client.text("hello")
        assert await client.message() == "hello"
        server.shutdown.set()
        assert (await client.closing())[0] == 1001
        client.client.close()
        await probe.wait_left()
        with trio.fail_after(DEADLINE):
            await server.returned.wait()


async def test_the_application_ends_its_websockets() -> None:
    probe = WebsocketProbe()
    async with serving(probe.app) as server:
        client = await open_websocket(server, "/wait")
        await probe.entered.wait()
        probe.app.end_requests(trio.current_time() + 0.02)
        assert await client.closing() == (1001, "The server is shutting down.")
        await probe.wait_left()


async def test_the_log_of_accesses(caplog: pytest.LogCaptureFixture) -> None:
    probe = WebsocketProbe()
    with caplog.at_level(logging.INFO, "trioserve.access"):
        async with serving(probe.app, access_log=True) as server:
            client = await open_websocket(server, "/return?secret=1")
            await client.message()
            await client.closing()
            await server.ask(handshake("/refuse"))
            await trio.testing.wait_all_tasks_blocked()
    lines = [record.getMessage() for record in caplog.records if record.name == "trioserve.access"]
    assert [line.split()[:3] for line in lines] == [["GET", "/return", "101"], ["GET", "/refuse", "401"]]


async def test_open_websockets_are_connections_and_are_counted() -> None:
    probe = WebsocketProbe()
    async with serving(probe.app, max_connections=2) as server:
        first, second = [await open_websocket(server, "/echo") for _ in range(2)]
        for client in first, second:
            await client.text("hello")
            await client.message()
        assert (probe.open, probe.most_open) == (2, 2)
        assert (await server.ask(get("/hello"))).status == 503
        await first.send(frame(CLOSE))
        await first.closing()
        first.client.close()
        await trio.testing.wait_all_tasks_blocked()
        assert probe.open == 1
        assert (await server.ask(get("/hello"))).status == 200
