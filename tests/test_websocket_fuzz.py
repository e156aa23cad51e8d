"""Random and damaged frames: the server lives, and a neighbour's WebSocket loses nothing.

TRIOSERVE_FUZZ_EXAMPLES=3000 pytest tests/test_websocket_fuzz.py looks deeper, and elsewhere each time.
"""

from __future__ import annotations

from functools import reduce

import attrs
import trio
import trio.testing
from hypothesis import example, given
from hypothesis import strategies as st
from wsproto.events import CloseConnection

from helpers_http import Server, serving
from helpers_http_fuzz import changes, damage
from helpers_websocket import TEXT, WebsocketProbe, frame, handshake, open_websocket
from test_http_fuzz import fuzzing, no_failure_in_the_log

CODES = {1000, 1001, 1002, 1003, 1005, 1007, 1008, 1009, 1010, 1011, 1012, 1013, *range(3000, 5000)}

payloads = st.binary(max_size=300) | st.sampled_from(
    [b"", b"hello", "κόσμε".encode(), b"\xce\xba\xe1", b"\xff", b"\x03\xe8bye", b"\x03\xed", b"x" * 3000]
)
frames = st.builds(
    lambda opcode, payload, fin, reserved, masked, length: frame(
        opcode, payload, fin=fin, reserved=reserved, masked=masked, length=length
    ),
    st.sampled_from([0, 1, 1, 2, 8, 9, 9, 10]) | st.integers(0, 15),
    payloads,
    st.sampled_from([True, True, False]),
    st.sampled_from([0] * 15 + [1, 2, 4]),
    st.sampled_from([True] * 9 + [False]),
    st.sampled_from([None] * 9 + [0, 5, 126, 65536, 2**62]),
)


@attrs.frozen
class Case:
    """What one connection sends, in parts of these sizes, after a handshake or with it."""

    data: bytes
    parts: tuple[int, ...]
    at_once: bool


cases = st.builds(
    Case,
    st.one_of(
        st.binary(max_size=200),
        st.lists(frames, max_size=8).map(b"".join),
        st.builds(
            lambda data, damages: reduce(damage, damages, b"".join(data)),
            st.lists(frames, min_size=1, max_size=5),
            st.lists(changes, min_size=1, max_size=3),
        ),
    ),
    st.lists(st.integers(1, 200), max_size=4).map(tuple),
    st.booleans(),
)


async def exchange(server: Server, case: Case) -> None:
    """Whatever comes back are frames, and whatever ends it is a code that may be sent."""
    data = case.data
    if case.at_once:
        client = await server.connect()
        await client.send(handshake("/echo") + data)
        client.half_close()
        answer = await client.read_to_end()
        assert answer.startswith(b"HTTP/1.1 101 ") or not answer
        return
    websocket = await open_websocket(server, "/echo")
    try:
        for size in (*case.parts, len(data)):
            await websocket.send(data[:size])
            data = data[size:]
            await trio.sleep(0.001)
        websocket.client.half_close()
    except OSError:
        pass  # it was closed before
    except trio.BrokenResourceError:
        pass
    while (event := await websocket.next()) is not None:
        if isinstance(event, CloseConnection):
            assert int(event.code) in CODES
            assert await websocket.next() is None
            return


async def run_cases(cases: list[Case]) -> None:
    probe = WebsocketProbe()
    async with serving(probe.app, keep_alive_timeout=1.0, max_body_size=4000) as server:
        neighbour = await open_websocket(server, "/echo")
        async with trio.open_nursery() as nursery:
            for case in cases:
                nursery.start_soon(exchange, server, case)
        await neighbour.text("still here")
        assert await neighbour.message() == "still here"
        server.close_clients()
        await trio.testing.wait_all_tasks_blocked(0.002)
        assert probe.open == 0, "a handler outlived its connection"


@fuzzing
@example([Case(frame(TEXT, b"a", fin=False) + frame(9, b"p") + frame(0, b"b"), (3, 9), False)])
@example([Case(frame(8, b"\x03\xe8") + frame(8, b"\x03\xe8"), (), False)])
@given(st.lists(cases, min_size=1, max_size=12))
def test_any_frames(cases: list[Case]) -> None:
    with no_failure_in_the_log():
        trio.run(run_cases, cases, clock=trio.testing.MockClock(autojump_threshold=0.003))
