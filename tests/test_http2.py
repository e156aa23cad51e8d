"""HTTP/2 over TLS: many requests on a connection, each with a scope of its own."""

from __future__ import annotations

import logging
import re
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import h2.errors
import h2.events
import h2.settings
import hpack
import pytest
import quart
import trio
import trio.testing

from helpers_http import DEADLINE, Client, Probe, Reply, Server, get, serving
from helpers_tls import Authority, Http2Client
from trioserve.server.sse import sse_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

Codes = h2.errors.ErrorCodes


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serving_http2(probe: Probe, authority: Authority, **options):
    return serving(probe.app, certificates=authority.certificates(http2=True), **options)


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.02)


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


async def test_a_stream_of_events_arrives_as_it_is_sent(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        stream_id = await client.begin("/stream/gate")
        for _ in range(100):
            expected = probe.gate.let(1)
            assert await client.read_data(stream_id) == expected
        probe.gate.end()
        await client.wait_for(h2.events.StreamEnded, stream_id)


async def test_much_data_arrives_whole_through_small_windows(probe: Probe, authority: Authority) -> None:
    sizes = [1, 15, 16, 4096, 16384, 16385, 65536, 300_000, 7, 500_000]

    class Blocks:
        def __init__(self) -> None:
            self.sizes = list(sizes)

        async def next_frame(self) -> bytes | None:
            return bytes([len(self.sizes)]) * self.sizes.pop(0) if self.sizes else None

    @probe.app.get("/blocks")
    async def blocks() -> quart.Response:
        return sse_response(Blocks())

    expected = b"".join(bytes([10 - n]) * size for n, size in enumerate(sizes))
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority, receive_buffer=4096, window=9000)
        streams = [await client.begin("/blocks") for _ in range(3)]
        for stream_id in streams:
            assert (await client.read_reply(stream_id)).body == expected


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


def head(changes: dict[bytes, bytes | None]) -> bytes:
    usual = {b":method": b"GET", b":scheme": b"https", b":path": b"/hello", b":authority": b"localhost"}
    headers = {name: value for name, value in (usual | changes).items() if value is not None}
    ordered = sorted(headers.items(), key=lambda item: not item[0].startswith(b":"))
    return hpack.Encoder().encode(ordered)


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
            assert status == 200 or reply.error["type"] == "invalid_request_error"
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


# Clients that do not read


@attrs.define
class Counted:
    """A stream that never ends, and how much of it was taken."""

    taken: int = 0

    async def next_frame(self) -> bytes:
        self.taken += 10_000
        return bytes(10_000)


def small_buffers() -> socket.socket:
    """A listener on whose connections the kernel takes little ahead of the client."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # they inherit it
    return listener


async def test_a_window_that_never_opens_buffers_nothing(probe: Probe, authority: Authority) -> None:
    sources = [Counted() for _ in range(20)]

    @probe.app.get("/counted/<int:n>")
    async def counted(n: int) -> quart.Response:
        return sse_response(sources[n])

    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority, window=0)
        for n in range(20):
            await client.begin(f"/counted/{n}")
        await settle()
        # Each has got rid of nothing, and holds what it was about to send.
        assert [source.taken for source in sources] == [10_000] * 20
        assert (await client.read_status(1)) == 200


async def test_a_socket_that_is_not_read_buffers_little(probe: Probe, authority: Authority) -> None:
    sources = [Counted() for _ in range(20)]

    @probe.app.get("/counted/<int:n>")
    async def counted(n: int) -> quart.Response:
        return sse_response(sources[n])

    async with serving_http2(probe, authority, listener=small_buffers()) as server:
        client = await Http2Client.connect(server, authority, receive_buffer=4096, window=2**30)
        client.h2.increment_flow_control_window(2**30)
        for n in range(20):
            await client.begin(f"/counted/{n}")
        await settle()
        before = sum(source.taken for source in sources)
        await settle()
        # What each stream holds, the kernel's buffers, and a few frames.
        assert 200_000 <= before == sum(source.taken for source in sources) < 500_000


async def test_a_blocked_stream_is_given_up_and_the_others_live(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority, write_timeout=0.2) as server:
        client = await Http2Client.connect(server, authority)
        waiting = await client.begin("/stream/gate")
        expected = probe.gate.let(1)
        assert await client.read_data(waiting) == expected
        probe.left = trio.Event()
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await client.flush()
        blocked = await client.begin("/stream/flood")
        reset = await client.wait_for(h2.events.StreamReset, blocked)
        assert reset.error_code == Codes.CANCEL
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 65_535})
        await client.flush()
        expected = probe.gate.let(1)
        assert await client.read_data(waiting) == expected
        assert probe.left.is_set()


async def test_windows_that_open_for_others_are_no_progress(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority, write_timeout=0.5) as server:
        client = await Http2Client.connect(server, authority, window=0)
        await client.begin("/stream/flood")
        other = await client.begin("/wait")
        with trio.fail_after(DEADLINE):
            while not probe.left.is_set():
                client.h2.increment_flow_control_window(1, other)
                await client.flush()
                await trio.sleep(0.02)


async def test_a_client_that_reads_nothing_is_dropped(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority, write_timeout=0.1) as server:
        client = await Http2Client.connect(server, authority, receive_buffer=4096, window=2**30)
        client.h2.increment_flow_control_window(2**30)
        await client.begin("/stream/flood")
        await probe.wait_left()


# Clients that break the protocol, or flood


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """RFC 9113, section 4.1."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def requests_and_resets(count: int) -> bytes:
    block = head({b":path": b"/wait"})
    pairs = (frame(1, 5, 2 * n + 1, block) + frame(3, 0, 2 * n + 1, bytes(4)) for n in range(count))
    return b"".join(pairs)


POST = head({b":method": b"POST", b":path": b"/echo"})
PRIORITY = bytes(4) + b"\x10"

BROKEN = {
    "data on a stream that is not there": (frame(0, 0, 1, b"x"), Codes.PROTOCOL_ERROR),
    "an even stream": (frame(1, 5, 2, head({})), Codes.PROTOCOL_ERROR),
    "a frame that is too long": (frame(0, 0, 1, bytes(16385)), Codes.FRAME_SIZE_ERROR),
    "headers that do not decode": (frame(1, 5, 1, b"\xff\xff\xff\xff\xff\xff"), Codes.PROTOCOL_ERROR),
    "padding that is too long": (frame(0, 8, 1, b"\xff"), Codes.PROTOCOL_ERROR),
    "continuation of nothing": (frame(9, 4, 1, head({})), Codes.PROTOCOL_ERROR),
    "something amid headers": (frame(1, 0, 1, head({})) + frame(6, 0, 0, bytes(8)), Codes.PROTOCOL_ERROR),
    "a window that is too large": (frame(8, 0, 0, b"\x7f\xff\xff\xff"), Codes.FLOW_CONTROL_ERROR),
    "a window update of nothing": (frame(8, 0, 0, bytes(4)), Codes.PROTOCOL_ERROR),
    "a ping that is too short": (frame(6, 0, 0, b"x"), Codes.FRAME_SIZE_ERROR),
    "more body than announced": (
        frame(1, 4, 1, head({b":method": b"POST", b"content-length": b"1"})) + frame(0, 1, 1, b"abc"),
        Codes.PROTOCOL_ERROR,
    ),
    "more streams than allowed": (
        b"".join(frame(1, 5, 2 * n + 1, head({b":path": b"/wait"})) for n in range(101)),
        Codes.PROTOCOL_ERROR,
    ),
    "a promise": (frame(5, 4, 1, bytes(4) + head({})), Codes.PROTOCOL_ERROR),
    "pings": (frame(6, 0, 0, bytes(8)) * 2000, Codes.ENHANCE_YOUR_CALM),
    "settings": (frame(4, 0, 0) * 2000, Codes.ENHANCE_YOUR_CALM),
    "priorities": (frame(2, 0, 3, PRIORITY) * 2000, Codes.ENHANCE_YOUR_CALM),
    "window updates": (frame(8, 0, 0, b"\0\0\0\1") * 2000, Codes.ENHANCE_YOUR_CALM),
    "empty data": (frame(1, 4, 1, POST) + frame(0, 0, 1) * 2000, Codes.ENHANCE_YOUR_CALM),
    "tiny data": (frame(1, 4, 1, POST) + frame(0, 0, 1, b"x") * 2000, Codes.ENHANCE_YOUR_CALM),
    "unknown frames": (frame(99, 0, 0) * 2000, Codes.ENHANCE_YOUR_CALM),
    "resets": (requests_and_resets(2000), Codes.ENHANCE_YOUR_CALM),
    "empty continuations": (frame(1, 0, 1, head({})) + frame(9, 0, 1) * 2000, Codes.ENHANCE_YOUR_CALM),
    "endless headers": (frame(1, 0, 1, head({})) + frame(9, 0, 1, bytes(16384)) * 5, Codes.ENHANCE_YOUR_CALM),
    "a header bomb": (
        # A header of 4,000 bytes enters the table, and is named 1,000 times by one byte each.
        frame(1, 5, 1, head({b"x": bytes(4000)}) + b"\xbe" * 1000),
        Codes.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize(("data", "code"), BROKEN.values(), ids=BROKEN)
async def test_breaking_the_protocol_ends_the_connection_alone(
    probe: Probe, authority: Authority, data: bytes, code: Codes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_http2(probe, authority) as server:
        neighbour = await Http2Client.connect(server, authority)
        stream_id = await neighbour.begin("/stream/gate")
        expected = probe.gate.let(1)
        assert await neighbour.read_data(stream_id) == expected
        client = await Http2Client.connect(server, authority)
        end = await last_words(client, data)
        assert end.error_code == code
        expected = probe.gate.let(1)
        assert await neighbour.read_data(stream_id) == expected
        assert (await neighbour.ask("/hello")).body == b"hello"
    assert not caplog.records


async def last_words(client: Http2Client, data: bytes) -> h2.events.ConnectionTerminated:
    """The GOAWAY that answers `data`, whatever else comes before it."""
    received = bytearray()

    async def send() -> None:
        with suppress(trio.BrokenResourceError):
            await client.send_raw(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        with trio.fail_after(DEADLINE):
            while part := await client.client.stream.receive_some():
                received += part
    *_, goaway = (payload for kind, payload in split_frames(bytes(received)) if kind == 7)
    end = h2.events.ConnectionTerminated()
    end.error_code = Codes(int.from_bytes(goaway[4:8], "big"))
    return end


def split_frames(data: bytes) -> list[tuple[int, bytes]]:
    frames = []
    while data:
        size = int.from_bytes(data[:3], "big")
        frames.append((data[3], data[9 : 9 + size]))
        data = data[9 + size :]
    return frames


CRASH_INPUTS = {
    "goaway while streaming": frame(1, 5, 1, head({b":path": b"/stream/trickle"})) + frame(7, 0, 0, bytes(8)),
    "data after the answer": frame(1, 4, 1, head({b":method": b"POST", b":path": b"/refuse"}))
    + frame(0, 0, 1, bytes(1000)) * 50,
    "1500 priority frames": b"".join(frame(2, 0, 2 * n + 1, PRIORITY) for n in range(1500)),
    "priority on a missing parent": frame(2, 0, 3, (99).to_bytes(4, "big") + b"\x10"),
    "method not ascii": frame(1, 5, 1, head({b":method": b"G\xc3\x89T"})),
    "path not ascii": frame(1, 5, 1, head({b":path": b"/\xff\xfe"})),
    "connect": frame(1, 5, 1, head({b":method": b"CONNECT", b":path": None, b":scheme": None})),
    "upgrade to h2c": get(
        "/hello", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: %%%"
    ),
    "everything at once": frame(1, 4, 1, POST)
    + frame(3, 0, 1, bytes(4))
    + frame(0, 0, 1, bytes(100))
    + frame(1, 5, 3, head({b":path": b"\xff"}))
    + frame(3, 0, 3, bytes(4))
    + frame(7, 0, 0, bytes(8)),
}


@pytest.mark.parametrize("data", CRASH_INPUTS.values(), ids=CRASH_INPUTS)
async def test_what_stopped_stock_hypercorn(
    probe: Probe, authority: Authority, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_http2(probe, authority) as server:
        for _ in range(10):
            client = await Http2Client.connect(server, authority)
            with suppress(trio.BrokenResourceError):
                await client.send_raw(data)
            await trio.testing.wait_all_tasks_blocked()
            client.client.close()
        neighbour = await Http2Client.connect(server, authority)
        assert (await neighbour.ask("/hello")).body == b"hello"
    assert not caplog.records


async def test_garbage_after_the_handshake(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        for data in (bytes(100), get("/hello"), b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"):
            client = await server.connect(tls=authority.client("h2"))
            await client.send(data)
            assert await client.read_to_end()  # SETTINGS and a GOAWAY
        client = await Http2Client.connect(server, authority)
        assert (await client.ask("/hello")).body == b"hello"


async def test_a_client_that_makes_us_answer_and_does_not_read(probe: Probe, authority: Authority) -> None:
    """Each DATA on a closed stream is answered: that must not pile up."""
    listener = small_buffers()
    async with serving_http2(probe, authority, write_timeout=1000.0, listener=listener) as server:
        client = await Http2Client.connect(server, authority, receive_buffer=4096)
        stream_id = await client.begin("/echo", method="POST", end=False)
        await reset_stream(client, stream_id)
        await client.flush()
        with suppress(trio.BrokenResourceError), trio.fail_after(DEADLINE):
            while True:  # until the server closes
                await client.client.send(frame(0, 0, stream_id, bytes(64)) * 100)


async def test_headers_tables_do_not_grow(probe: Probe, authority: Authority) -> None:
    """A client may ask for a table of any size, which would hold every header that was ever sent to it."""

    @probe.app.get("/large/<int:n>")
    async def large(n: int) -> quart.Response:
        return quart.Response("", headers={"x-large": f"{n:01000d}"})

    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        client.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 1_000_000})
        await client.flush()
        await client.ask("/hello")
        for n in range(50):
            await client.ask(f"/large/{n}")
        assert client.h2.decoder.header_table._current_size <= 4096


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
