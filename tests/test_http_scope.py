"""A request's stack: open over handler and body, closed whatever ends the request."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from helpers_http import Client, Gate, Probe, get, serving, start_stream, stock_hypercorn
from trioserve.server.errors import deadline_exceeded, describe, install_error_handler
from trioserve.server.framing import last_frames
from trioserve.server.request_scope import App, request_deadline, request_stack
from trioserve.server.sse import sse_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import quart


class Recorder:
    """A resource with a cleanup that waits, as a well-behaved one may have."""

    def __init__(self, gate: Gate) -> None:
        self.events: list[str] = []
        self.gate = gate

    @asynccontextmanager
    async def resource(self) -> AsyncIterator[None]:
        self.events.append("opened")
        try:
            yield
            await trio.lowlevel.checkpoint()
            self.events.append("closed at the end")
        finally:
            self.events.append("closed")

    async def next_frame(self) -> bytes | None:
        self.events.append("frame")
        return await self.gate.next_frame()


@pytest.fixture
def recorder(probe: Probe) -> Recorder:
    recorder = Recorder(probe.gate)

    @probe.app.get("/recorded")
    async def recorded() -> quart.Response:
        await request_stack().enter_async_context(recorder.resource())
        return sse_response(recorder)

    return recorder


async def test_the_stack_spans_the_body_and_closes_before_the_end(probe: Probe, recorder: Recorder) -> None:
    async with serving(probe.app) as server:
        client = await start_stream(server, "/recorded")
        expected = probe.gate.let(2)
        probe.gate.end()
        reply = await client.read_reply()
        assert reply.body == expected
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-cache"
        assert recorder.events == ["opened", "frame", "frame", "frame", "closed at the end", "closed"]


async def test_leaving_closes_the_stack_by_cancellation(probe: Probe, recorder: Recorder) -> None:
    async with serving(probe.app) as server:
        client = await start_stream(server, "/recorded")
        probe.gate.let(1)
        await client.read_head()
        client.close()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert recorder.events == ["opened", "frame", "frame", "closed"]


async def test_the_stack_closes_when_the_body_never_starts(probe: Probe, recorder: Recorder) -> None:
    held = trio.Event()

    @probe.app.after_request
    async def hold(response: quart.Response) -> quart.Response:
        held.set()
        await trio.sleep_forever()
        return response

    async with serving(probe.app) as server:
        client = await start_stream(server, "/recorded")
        await held.wait()
        client.close()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert recorder.events == ["opened", "closed"]


async def test_a_handler_that_fails_closes_the_stack(
    probe: Probe, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    @probe.app.get("/fails")
    async def fails() -> str:
        await request_stack().enter_async_context(recorder.resource())
        raise RuntimeError("boom")

    async with serving(probe.app) as server:
        assert (await server.ask(get("/fails"))).status == 500
    assert recorder.events[0] == "opened"
    assert recorder.events[-1] == "closed"
    assert "boom" in caplog.text


async def test_an_error_beside_a_disconnect_is_logged(probe: Probe, caplog: pytest.LogCaptureFixture) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise RuntimeError("at the same moment")

    @probe.app.get("/both")
    async def both() -> str:
        probe.entered.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_when_cancelled)
            nursery.start_soon(trio.sleep_forever)
        return "unreachable"

    async with serving(probe.app) as server:
        client = await start_stream(server, "/both")
        await probe.entered.wait()
        client.close()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert (await server.ask(get("/hello"))).body == b"hello"
    assert "at the same moment" in caplog.text


async def test_a_response_timeout_of_the_application_cuts_the_response(probe: Probe) -> None:
    @probe.app.get("/short")
    async def short() -> quart.Response:
        await trio.lowlevel.checkpoint()
        response = sse_response(probe.gate)
        response.timeout = 0.1
        return response

    async with serving(probe.app) as server:
        client = await start_stream(server, "/short")
        frame = probe.gate.let(1)
        answer = await client.read_to_end()
        assert answer.endswith(frame + b"\r\n")  # without the end of the chunks


async def test_a_deadline_ends_a_blocked_write(probe: Probe) -> None:
    """The client reads nothing; the time limit of writes is far longer."""
    async with serving(probe.app) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(get("/stream/flood", "x-request-timeout: 0.2"))
        await probe.wait_left()
        answer = await client.read_to_end()
        assert answer.startswith(b"HTTP/1.1 200")
        assert not answer.endswith(b"0\r\n\r\n")


async def test_a_deadline_in_a_stream_is_told(probe: Probe) -> None:
    async with serving(probe.app) as server:
        client = await server.connect()
        await client.send(get("/stream/gate", "x-request-timeout: 0.2"))
        frame = probe.gate.let(1)
        body = (await client.read_reply()).body
        assert body.startswith(frame + b'data: {"error":{"code":"deadline_exceeded"')
        assert body.endswith(b"data: [DONE]\n\n")


async def test_a_deadline_in_a_handler_is_a_status(probe: Probe) -> None:
    install_error_handler(probe.app)
    async with serving(probe.app) as server:
        reply = await server.ask(get("/wait", "x-request-timeout: 0.2"))
        assert reply.status == 504
        await probe.wait_left()


def test_responses_have_no_time_limit_unless_they_set_one() -> None:
    assert App(__name__).config["RESPONSE_TIMEOUT"] is None
    assert sse_response(Gate()).timeout is None


async def test_quarts_test_client(probe: Probe) -> None:
    response = await probe.app.test_client().get("/hello")
    assert await response.get_data() == b"hello"


async def test_stock_hypercorn_serves_it(probe: Probe, recorder: Recorder) -> None:
    async with stock_hypercorn(probe.app) as address:
        client = Client(await trio.open_tcp_stream(*address))
        await client.send(get("/recorded"))
        expected = probe.gate.let(2)
        probe.gate.end()
        assert (await client.read_reply()).body == expected
        client.close()
        assert recorder.events[-2:] == ["closed at the end", "closed"]

        leaver = Client(await trio.open_tcp_stream(*address))
        await leaver.send(get("/wait"))
        await probe.entered.wait()
        leaver.close()
        await probe.wait_left()


class InTime:
    """Its only frame comes in the same moment as the end of the request's time."""

    def __init__(self) -> None:
        self._deadline = request_deadline()

    async def next_frame(self) -> bytes:
        self._deadline.end_by(trio.current_time(), deadline_exceeded)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return b"data: x\n\n"

    def last_frames(self, error: Exception) -> bytes:
        return last_frames(describe(error).detail)


async def test_out_of_time_as_the_first_frame_is_written(probe: Probe) -> None:
    @probe.app.get("/in-time")
    async def in_time() -> quart.Response:
        return sse_response(InTime())

    async with serving(probe.app) as server:
        reply = await server.ask(get("/in-time"))
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert b"deadline_exceeded" in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")
