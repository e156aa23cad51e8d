"""Clients that break HTTP/2, or flood: each costs its own connection."""

from __future__ import annotations

from contextlib import suppress

import h2.errors
import h2.events
import h2.settings
import hpack
import pytest
import quart
import trio
import trio.testing

from helpers_http import DEADLINE, Probe, get
from helpers_http2 import (
    frame,
    head,
    last_words,
    serving_http2,
    small_buffers,
)
from helpers_tls import Authority, Http2Client
from trioserve.server import h2_budget, h2_outbox

Codes = h2.errors.ErrorCodes


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
    "windows beyond all bounds": (
        frame(1, 5, 1, head({b":path": b"/wait"}))
        + frame(8, 0, 1, b"\x7f\xff\0\0")
        + frame(4, 0, 0, b"\0\4\x7f\xff\xff\xff"),
        Codes.FLOW_CONTROL_ERROR,
    ),
    "trailers that are not the end": (
        frame(1, 4, 1, POST) + frame(1, 4, 1, hpack.Encoder().encode([(b"x", b"y")])),
        Codes.PROTOCOL_ERROR,
    ),
    "less body than announced": (
        frame(1, 4, 1, head({b":method": b"POST", b"content-length": b"9"})) + frame(0, 1, 1, b"abc"),
        Codes.PROTOCOL_ERROR,
    ),
    "a stream that was passed by": (
        frame(1, 5, 5, head({})) + frame(1, 5, 3, head({})),
        Codes.PROTOCOL_ERROR,
    ),
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


BROKEN_STREAMS = {
    "the same stream again": (frame(1, 5, 1, head({b":path": b"/wait"})), Codes.STREAM_CLOSED),
    "data after the end": (frame(0, 0, 1, b"x" * 100), Codes.STREAM_CLOSED),
    "a window that is too large": (frame(8, 0, 1, b"\x7f\xff\xff\xff"), Codes.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize(("data", "code"), BROKEN_STREAMS.values(), ids=BROKEN_STREAMS)
async def test_breaking_a_stream_ends_the_stream_alone(
    probe: Probe, authority: Authority, data: bytes, code: Codes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        assert await client.begin("/wait") == 1
        await probe.entered.wait()
        neighbour = await client.begin("/stream/gate")
        await client.send_raw(data)
        assert (await client.wait_for(h2.events.StreamReset, 1)).error_code == code
        await probe.wait_left()
        expected = probe.gate.let(1)
        assert await client.read_data(neighbour) == expected
    assert not caplog.records


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


async def test_a_window_of_a_byte_at_a_time(
    probe: Probe, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update of the window costs us a frame and its way: what is sent so does not pay for them."""
    monkeypatch.setattr(h2_budget, "_BURST", 50.0)
    monkeypatch.setattr(h2_budget, "_PER_SECOND", 0.0)
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority, window=0)
        client.acknowledges = False
        stream_id = await client.begin("/stream/flood")
        received = 0
        while not (ends := [e for e in client.events if isinstance(e, h2.events.ConnectionTerminated)]):
            assert received < 100
            client.h2.increment_flow_control_window(1, stream_id)
            await client.flush()
            await client.more()
            received += 1
        assert ends[0].error_code == Codes.ENHANCE_YOUR_CALM
        assert received > 30


async def test_garbage_after_the_handshake(probe: Probe, authority: Authority) -> None:
    async with serving_http2(probe, authority) as server:
        for data in (bytes(100), get("/hello"), b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"):
            client = await server.connect(tls=authority.client("h2"))
            await client.send(data)
            assert await client.read_to_end()  # SETTINGS and a GOAWAY
        client = await Http2Client.connect(server, authority)
        assert (await client.ask("/hello")).body == b"hello"


async def test_a_client_that_makes_us_answer_and_does_not_read(
    probe: Probe, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each DATA on a closed stream is answered: that must not pile up."""
    monkeypatch.setattr(h2_outbox, "_MAX_UNREAD", 16 * 1024)
    limits = {"write_timeout": 1000.0, "keep_alive_timeout": 0.2}
    async with serving_http2(probe, authority, listener=small_buffers(), **limits) as server:
        client = await Http2Client.connect(server, authority, receive_buffer=4096)
        await client.begin("/wait")  # so that it is not idle
        stream_id = await client.begin("/echo", method="POST", end=False)
        client.h2.reset_stream(stream_id)
        await client.flush()
        with suppress(trio.BrokenResourceError), trio.fail_after(DEADLINE):
            while True:  # until the server closes
                await client.client.send(frame(0, 0, stream_id, bytes(64)) * 100)


@pytest.mark.parametrize("sizes", [[0], [0, 0], [100, 4096], [0, 100_000, 50], [100] * 20])
async def test_a_client_may_want_a_smaller_table_of_headers(
    probe: Probe, authority: Authority, sizes: list[int]
) -> None:
    """One that has not been told that it got what it wants must take headers for broken (RFC 7541, 4.2)."""
    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority)
        assert (await client.ask("/hello")).status == 200
        for size in sizes:
            client.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: size})
        await client.flush()
        for _ in range(3):
            assert (await client.ask("/hello")).body == b"hello"


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
