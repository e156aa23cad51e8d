"""Clients of HTTP/2 that do not read, or read slowly."""

from __future__ import annotations

import attrs
import h2.errors
import h2.events
import h2.settings
import pytest
import quart
import trio

from helpers_http import DEADLINE, Probe
from helpers_http2 import (
    serving_http2,
    settle,
    small_buffers,
)
from helpers_tls import Authority, Http2Client
from trioserve.server.errors import deadline_exceeded
from trioserve.server.request_scope import request_deadline
from trioserve.server.sse import sse_response

Codes = h2.errors.ErrorCodes


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


@attrs.define
class Counted:
    """A stream that never ends, and how much of it was taken."""

    taken: int = 0

    async def next_frame(self) -> bytes:
        self.taken += 10_000
        return bytes(10_000)


WAYS_TO_OPEN = {
    "of the stream": lambda client, stream_id: client.h2.increment_flow_control_window(10**6, stream_id),
    "of the connection": lambda client, _: client.h2.increment_flow_control_window(10**6),
    "of all streams": lambda client, _: client.h2.update_settings(
        {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10**6}
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_OPEN)
async def test_a_waiting_stream_goes_on_when_its_window_opens(
    probe: Probe, authority: Authority, way: str
) -> None:
    @probe.app.get("/blocks")
    async def blocks() -> quart.Response:
        return quart.Response(bytes(90_000))

    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(
            server, authority, window=10**6 if way == "of the connection" else 1000
        )
        if way != "of the connection":
            client.h2.increment_flow_control_window(10**6)
        client.acknowledges = False
        stream_id = await client.begin("/blocks")
        await settle()
        WAYS_TO_OPEN[way](client, stream_id)
        await client.flush()
        assert (await client.read_reply(stream_id)).body == bytes(90_000)


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


async def test_out_of_time_in_the_middle_of_an_event_resets_the_stream(
    probe: Probe, authority: Authority
) -> None:
    """An error event behind a part of another event would be read as one with it."""
    deadlines = []

    @probe.app.get("/counted")
    async def counted() -> quart.Response:
        deadlines.append(request_deadline())
        return sse_response(Counted())

    async with serving_http2(probe, authority) as server:
        client = await Http2Client.connect(server, authority, window=15_000)
        client.acknowledges = False
        blocked = await client.begin("/counted")
        data = b""
        while len(data) < 15_000:
            data += (await client.wait_for(h2.events.DataReceived, blocked)).data
        deadlines[0].end_by(trio.current_time(), deadline_exceeded)
        assert (await client.wait_for(h2.events.StreamReset, blocked)).error_code == Codes.CANCEL
        assert (await client.ask("/hello")).body == b"hello"
