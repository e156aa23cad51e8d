"""HTTP/2 over TLS: many requests on a connection, each with a scope of its own."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import h2.errors
import h2.events
import h2.settings
import pytest
import quart
import trio

from helpers_http import DEADLINE, Client, Probe, Reply, Server, serving
from helpers_http2 import (
    frame,
    head,
    serving_http2,
    settle,
    small_buffers,
    split_frames,
)
from helpers_tls import Authority, Http2Client
from trioserve.server import h2_protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

Codes = h2.errors.ErrorCodes


# Requests and responses


async def test_requests_one_after_the_other(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        for n in range(200):
            assert (await client.ask(f"/hello?n={n}")).body == b"hello %d" % n


async def test_many_requests_at_a_time(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        waiting = [await client.begin("/wait") for _ in range(50)]
        streams = [await client.begin(f"/hello?n={n}") for n in range(50)]
        replies = [await client.read_reply(stream_id) for stream_id in reversed(streams)]
        assert [reply.body for reply in replies] == [b"hello %d" % n for n in reversed(range(50))]
        assert waiting


async def test_what_the_application_sees(probe: Probe, authority: Authority) -> None:
    @probe.app.get("/seen")
    async def seen() -> dict[str, object]:
        request = quart.request
        return {
            "scheme": request.scheme,
            "version": request.http_version,
            "host": request.host,
            "query": request.query_string.decode(),
            "headers": sorted(item for item in request.headers.items() if item[0] != "Remote-Addr"),
        }

    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        reply = await client.ask("/seen?a=%20b", x_own="1", cookie="a=1")
        assert quart.json.loads(reply.body) == {
            "scheme": "https",
            "version": "2",
            "host": "localhost",
            "query": "a=%20b",
            "headers": [["Cookie", "a=1"], ["Host", "localhost"], ["X-Own", "1"]],
        }


async def test_bodies(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        for size in (0, 1, 65_535, 65_536, 3_000_000):
            assert (await client.post("/echo", bytes(size))).body == b'{"size":%d}\n' % size


async def test_a_padded_body(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        stream_id = await client.begin("/echo", method="POST", end=False)
        for _ in range(1000):  # more padding than all windows have room for
            while client.h2.local_flow_control_window(stream_id) < 512:
                await client.more()
            client.h2.send_data(stream_id, bytes(100), pad_length=255)
            await client.flush()
        client.h2.end_stream(stream_id)
        await client.flush()
        assert (await client.read_reply(stream_id)).body == b'{"size":100000}\n'


async def test_head_has_no_body(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        reply = await client.ask("/hello", method="HEAD")
        assert (reply.status, reply.body, reply.headers["content-length"]) == (200, b"", "5")


async def test_headers_of_http1_do_not_go_out(authority: Authority) -> None:
    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        names = [
            b"Connection",
            b"keep-alive",
            b"Transfer-Encoding",
            b"upgrade",
            b"proxy-connection",
            b"X-Own",
        ]
        headers = [(name, b"close") for name in names]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app, certificates=authority.certificates(http2=True)) as server:
        client = await Http2Client.connect(server, authority)
        reply = await client.ask("/")
        assert reply.body == b"ok"
        assert set(reply.headers) == {"x-own", "date"}


async def test_an_application_that_breaks_off_resets_its_stream(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/before":
            raise RuntimeError("before")
        headers = [(b"x-bad", b"a\r\nb")] if scope["path"] == "/header" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise RuntimeError("within")

    async with serving(app, certificates=authority.certificates(http2=True)) as server:
        client = await Http2Client.connect(server, authority)
        reply = await client.ask("/before")
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        stream_id = await client.begin("/within")
        assert await client.read_data(stream_id) == b"part"
        reset = await client.wait_for(h2.events.StreamReset, stream_id)
        assert reset.error_code == Codes.INTERNAL_ERROR
        assert (await client.ask("/header")).status == 500
    assert [record.name for record in caplog.records] == ["trioserve.http"] * 3


@pytest.mark.parametrize("path", ["/after-the-head", "/after-a-part"])
async def test_an_application_that_returns_without_an_end_resets_its_stream(
    authority: Authority, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/after-a-part":
            await send({"type": "http.response.body", "body": b"part", "more_body": True})

    async with serving(app, certificates=authority.certificates(http2=True)) as server:
        client = await Http2Client.connect(server, authority)
        for _ in range(2):
            stream_id = await client.begin(path)
            reset = await client.wait_for(h2.events.StreamReset, stream_id)
            assert reset.error_code == Codes.INTERNAL_ERROR
    assert not caplog.records


async def test_access_log(probe: Probe, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trioserve.access")
    async with serving_http2(probe, authority, access_log=True) as server:
        client = await Http2Client.connect(server, authority)
        await client.ask("/hello?n=secret")
        await client.ask("/echo", method="POST", content_length="99999999", end=False)
        stream_id = await client.begin("/wait")
        await probe.entered.wait()
        client.h2.reset_stream(stream_id)
        await client.flush()
        await probe.wait_left()
        await settle()
    lines = [record.getMessage() for record in caplog.records if record.name == "trioserve.access"]
    starts = ["GET /hello 200", "POST /echo 413", "GET /wait 499"]
    for line, start in zip(lines, starts, strict=True):
        assert re.fullmatch(rf"{start} \d+\.\d ms 127\.0\.0\.1:\d+", line)


async def test_what_is_no_request_is_logged_without_its_bytes(
    probe: Probe, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """They could move the cursor of the terminal that shows the log."""
    caplog.set_level(logging.INFO, "trioserve.access")
    async with serving_http2(probe, authority, access_log=True) as server:
        client = await Http2Client.connect(server, authority)
        for n, odd in enumerate([{b":method": b"\x1b[2J"}, {b":path": b"/\x1b[2J"}, {b":path": b"/\xff"}]):
            await client.send_raw(frame(1, 5, 2 * n + 1, head(odd)))
        with trio.fail_after(DEADLINE):
            while len(caplog.records) < 3:
                await settle()
    assert [" ".join(message.split()[:3]) for message in caplog.messages] == [
        "- /hello 400",
        "GET - 400",
        "GET - 400",
    ]


# Requests that are refused


async def test_a_body_that_is_announced_too_long(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority, max_body_size=1000) as server:
        client = await Http2Client.connect(server, authority)
        reply = await client.ask("/echo", method="POST", content_length="1001", x_request_id="abc")
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert "1000 bytes" in reply.error["message"]
        assert reply.headers["x-request-id"] == "abc"
        assert not probe.entered.is_set()
        assert (await client.post("/echo", bytes(1000))).status == 200


async def test_a_body_that_turns_out_too_long(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority, max_body_size=100_000) as server:
        client = await Http2Client.connect(server, authority)
        for _ in range(30):  # more than the connection's window would hold, were it not given back
            assert (await client.post("/echo", bytes(300_000))).status == 413
        assert probe.left.is_set()
        assert (await client.post("/echo", bytes(100_000))).status == 200


async def test_the_last_body_that_is_passed_over_gets_its_answer_too(
    probe: Probe, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h2_protocol, "MAX_DISCARD", 1000)
    async with serving_http2(probe, authority, max_body_size=10) as server:
        client = await Http2Client.connect(server, authority)
        for _ in range(3):
            stream_id = await client.begin("/echo", method="POST", end=False)
            client.h2.send_data(stream_id, bytes(800))
            await client.flush()
            assert (await client.read_reply(stream_id)).status == 413


async def test_an_early_answer_to_an_upload(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        for _ in range(3):
            assert (await client.post("/refuse", bytes(3_000_000))).status == 401


async def test_an_upload_that_nobody_takes_does_not_hold_up_others(authority: Authority) -> None:
    got = trio.Event()

    async def app(scope, receive, send) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/sleep":
            await trio.sleep_forever()
        size = 0
        while True:
            message = await receive()
            size += len(message["body"])
            if not message["more_body"]:
                break
        got.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % size})

    async with serving(app, certificates=authority.certificates(http2=True)) as server:
        client = await Http2Client.connect(server, authority)
        await client.wait_for(h2.events.WindowUpdated)
        for _ in range(20):
            stream_id = await client.begin("/sleep", method="POST", end=False)
            while window := client.h2.local_flow_control_window(stream_id):
                client.h2.send_data(stream_id, bytes(min(window, 16384)))
                await client.flush()
        await settle()
        with suppress(trio.TooSlowError), trio.fail_after(0.05):
            await client.more()
        # A stream's window, and no more, is taken ahead of the application.
        assert client.h2.local_flow_control_window(stream_id) == 0
        assert (await client.post("/take", bytes(200_000))).body == b"200000"
        assert got.is_set()
        client.h2.streams[stream_id].outbound_flow_control_window = 1  # of the client's own count
        client.h2.send_data(stream_id, b"x")
        await client.flush()
        end = await client.wait_for(h2.events.ConnectionTerminated)
        assert end.error_code == Codes.FLOW_CONTROL_ERROR


ODD_REQUESTS = {
    "method not ascii": ({b":method": b"G\xc3\x89T"}, 400),
    "method is not a word": ({b":method": b"GET /"}, 400),
    "path not ascii": ({b":path": b"/\xff\xfe"}, 400),
    "path is no path": ({b":path": b"hello"}, 400),
    "path is a star": ({b":path": b"*"}, 400),
    "path with a space": ({b":path": b"/hello world"}, 400),
    "path with an escape": ({b":path": b"/\x1b[31m"}, 400),
    "method in small letters": ({b":method": b"get"}, 501),
    "path is a url": ({b":path": b"https://localhost/hello"}, 400),
    "no path": ({b":path": None}, None),
    "empty path": ({b":path": b""}, None),
    "no method": ({b":method": None}, None),
    "no scheme": ({b":scheme": None}, None),
    "no host": ({b":authority": None}, None),
    "two hosts": ({b"host": b"elsewhere"}, None),
    "connect": ({b":method": b"CONNECT", b":path": None, b":scheme": None}, 400),
    "extended connect": ({b":method": b"CONNECT", b":protocol": b"websocket"}, 400),
    "unknown pseudo-header": ({b":magic": b"x"}, None),
    "header name not ascii": ({b"x-\xc3\xa9": b"x"}, None),
    "header name in capitals": ({b"X-Own": b"x"}, None),
    "header with a line break": ({b"x-own": b"a\r\nb: c"}, None),
    "header of http/1.1": ({b"connection": b"close"}, None),
    "transfer encoding": ({b"transfer-encoding": b"chunked"}, None),
    "length is no number": ({b"content-length": b"x"}, None),
    "two lengths": ({b"content-length": b"1, 2"}, None),
    "header value not ascii": ({b"x-own": b"\xff\xfe"}, 200),
    "too many headers": ({b"x-%d" % n: b"" for n in range(101)}, 431),
}


@pytest.mark.parametrize(("changes", "status"), ODD_REQUESTS.values(), ids=ODD_REQUESTS)
async def test_odd_requests(
    probe: Probe,
    authority: Authority,
    changes: dict[bytes, bytes | None],
    status: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those that are not well-formed end their connection; the others get an answer."""
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        client.h2.send_headers(
            1, [(":method", "GET"), (":scheme", "https"), (":path", "/wait"), ("host", "x")]
        )
        client.h2.send_headers(
            3, [(":method", "GET"), (":scheme", "https"), (":path", "/wait"), ("host", "x")]
        )
        client.h2.clear_outbound_data_buffer()  # so that the client expects an answer on stream 1
        await client.send_raw(frame(1, 4 | 1, 1, head(changes)))
        if status is None:
            end = await client.wait_for(h2.events.ConnectionTerminated)
            assert end.error_code == Codes.PROTOCOL_ERROR
            await client.read_to_end()
        else:
            reply = await client.read_reply(1)
            assert reply.status == status
            assert status == 200 or reply.error["type"] in {"invalid_request_error", "server_error"}
        neighbour = await Http2Client.connect(server, authority)
        assert (await neighbour.ask("/hello")).body == b"hello"
    assert not caplog.records


# Clients that leave


async def reset_stream(client: Http2Client, stream_id: int) -> None:
    client.h2.reset_stream(stream_id, Codes.CANCEL)
    await client.flush()


async def go_away(client: Http2Client, stream_id: int) -> None:
    client.h2.close_connection()
    await client.flush()


def leaving_by(leave: Callable[[Client], None]) -> Callable[[Http2Client, int], Awaitable[None]]:
    async def leave_now(client: Http2Client, stream_id: int) -> None:
        await trio.lowlevel.checkpoint()
        leave(client.client)

    return leave_now


async def say_goodbye(client: Http2Client, stream_id: int) -> None:
    await client.client.stream.aclose()


LEAVING = {
    "rst_stream": reset_stream,
    "goaway": go_away,
    "close": leaving_by(Client.close),
    "half_close": leaving_by(Client.half_close),
    "reset": leaving_by(Client.reset),
    "close_notify": say_goodbye,
}


async def begin(server: Server, authority: Authority, probe: Probe, moment: str) -> tuple[Http2Client, int]:
    """A request, brought to the moment at which its client will leave."""
    client = await Http2Client.connect(server, authority, receive_buffer=4096)
    paths = {"idle": "/stream/gate", "sending": "/stream/trickle", "blocked by the window": "/stream/flood"}
    if moment == "blocked by the socket":
        client.h2.increment_flow_control_window(2**30)
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
        stream_id = await client.begin("/stream/flood")
    elif moment == "uploading":
        stream_id = await client.begin("/echo", method="POST", end=False)
    else:
        stream_id = await client.begin(paths.get(moment, "/wait"))
    await probe.entered.wait()
    if moment in {"idle", "sending"}:
        probe.gate.let(1)
        assert await client.read_data(stream_id)
    else:
        await settle()
    return client, stream_id


@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize(
    "moment", ["waiting", "uploading", "idle", "sending", "blocked by the window", "blocked by the socket"]
)
async def test_leaving_ends_the_request(
    probe: Probe, authority: Authority, leaving: str, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_http2(probe, authority) as server:
        client, stream_id = await begin(server, authority, probe, moment)
        assert not probe.left.is_set()
        await LEAVING[leaving](client, stream_id)
        await probe.wait_left()
        neighbour = await Http2Client.connect(server, authority)
        assert (await neighbour.ask("/hello")).body == b"hello"
    assert not caplog.records


async def test_a_reset_stream_leaves_its_neighbours_alone(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        flood = await client.begin("/wait")
        await probe.entered.wait()
        stream_id = await client.begin("/stream/gate")
        expected = probe.gate.let(1)
        assert await client.read_data(stream_id) == expected
        await reset_stream(client, flood)
        await probe.wait_left()
        expected = probe.gate.let(1)
        assert await client.read_data(stream_id) == expected


# Idle connections


async def test_an_idle_connection_is_closed_with_a_word(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority, keep_alive_timeout=0.2) as server:
        client = await Http2Client.connect(server, authority)
        await client.ask("/hello")
        end = await client.wait_for(h2.events.ConnectionTerminated)
        assert (end.error_code, end.last_stream_id) == (Codes.NO_ERROR, 1)
        await client.read_to_end()


async def test_a_connection_with_a_request_is_not_idle(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority, keep_alive_timeout=0.1) as server:
        client = await Http2Client.connect(server, authority)
        stream_id = await client.begin("/stream/gate")
        await client.ask("/hello")
        await trio.sleep(0.3)
        expected = probe.gate.let(1)
        assert await client.read_data(stream_id) == expected


async def test_a_client_that_pauses_gets_the_rest_of_its_response(probe: Probe, authority: Authority) -> None:
    """A connection is idle when the response is with the client's kernel, not when it is ready to be sent."""

    @probe.app.get("/large")
    async def large() -> quart.Response:
        return quart.Response(bytes(30_000))

    limits = {"keep_alive_timeout": 0.1, "listener": small_buffers()}
    async with serving_http2(probe, authority, **limits) as server:
        client = await Http2Client.connect(server, authority, receive_buffer=4096)
        stream_id = await client.begin("/large")
        await trio.sleep(0.3)
        assert (await client.read_reply(stream_id)).body == bytes(30_000)
        await client.wait_for(h2.events.ConnectionTerminated)


async def test_pings_do_not_keep_an_idle_connection(
    probe: Probe, authority: Authority, autojump_clock: trio.testing.MockClock
) -> None:
    autojump_clock.autojump_threshold = 0.003
    async with serving_http2(probe, authority, keep_alive_timeout=2.0) as server:
        client = await Http2Client.connect(server, authority)
        await client.ask("/hello")
        for _ in range(3):
            client.h2.ping(bytes(8))
            await client.flush()
            await client.wait_for(h2.events.PingAckReceived)
            await trio.sleep(0.6)
        answered = trio.current_time()
        await client.wait_for(h2.events.ConnectionTerminated)
        assert trio.current_time() - answered < 0.5


# Shutdown


async def test_running_streams_go_on_in_the_drain(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        idle = await Http2Client.connect(server, authority)
        client = await Http2Client.connect(server, authority)
        stream_id = await client.begin("/stream/gate")
        expected = probe.gate.let(1)
        assert await client.read_data(stream_id) == expected
        await idle.ask("/hello")
        server.shutdown.set()
        await idle.wait_for(h2.events.ConnectionTerminated)
        await idle.read_to_end()
        late = head({})
        await client.send_raw(frame(1, 5, 3, late))
        received = b""
        while b"\x00\x00\x04\x03\x00\x00\x00\x00\x03\x00\x00\x00\x07" not in received:  # RST: REFUSED_STREAM
            received += await client.client.stream.receive_some()
        assert (7, (1).to_bytes(4, "big") + bytes(4)) in split_frames(received)  # GOAWAY: up to stream 1
        expected = probe.gate.let(1)
        probe.gate.end()
        rest = await client.client.read_to_end()
        assert [payload for kind, payload in split_frames(rest) if kind == 0] == [expected, b""]
        with trio.fail_after(DEADLINE):
            await server.returned.wait()


@pytest.mark.parametrize("path", ["/wait", "/stream/gate", "/stream/flood"])
async def test_what_outlasts_the_drain_is_cancelled(probe: Probe, authority: Authority, path: str) -> None:
    async with serving_http2(probe, authority, shutdown_timeout=0.1) as server:
        client = await Http2Client.connect(server, authority, receive_buffer=4096)
        await client.begin(path)
        await probe.entered.wait()
        server.shutdown.set()
        with trio.fail_after(DEADLINE):
            await server.returned.wait()
        assert probe.left.is_set()


# Another client


async def test_httpx2(probe: Probe, authority: Authority) -> None:
    import httpx2

    def ask(url: str) -> list[Reply]:
        with httpx2.Client(http2=True, verify=authority.client()) as client:
            answers = [client.get(f"{url}/hello?n=1"), client.post(f"{url}/echo", content=bytes(300_000))]
            assert {answer.http_version for answer in answers} == {"HTTP/2"}
            return [Reply(answer.status_code, dict(answer.headers), answer.content) for answer in answers]

    async with serving_http2(probe, authority) as server:
        replies = await trio.to_thread.run_sync(ask, f"https://localhost:{server.address[1]}")
        assert [reply.body for reply in replies] == [b"hello 1", b'{"size":300000}\n']
