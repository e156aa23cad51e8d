"""Random bytes and damaged requests: the server lives, and a neighbour's stream loses nothing.

TRIOSERVE_FUZZ_EXAMPLES=3000 pytest tests/test_http_fuzz.py looks deeper, and elsewhere each time.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import h11
import trio
import trio.testing
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers_http import Server, get, serving
from helpers_http_fuzz import Case, CountingApplication, cases, whole_request

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = int(os.environ.get("TRIOSERVE_FUZZ_EXAMPLES", "0"))
fuzzing = settings(
    max_examples=EXAMPLES or 40,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# What must hold


@attrs.frozen
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


def parse_answer(data: bytes, method: bytes) -> tuple[Answer, bytes]:
    """The first answer in `data`, to a request of this method, and what follows it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "test")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    client.receive_data(b"")
    while isinstance(head := client.next_event(), h11.InformationalResponse):
        assert head.status_code == 100
    assert isinstance(head, h11.Response)
    body = b""
    answer = partial(Answer, head.status_code, dict(head.headers))
    try:
        while isinstance(event := client.next_event(), h11.Data):
            body += event.data
    except h11.RemoteProtocolError:
        assert b"x-may-break" in dict(head.headers)
        return answer(body), b""
    assert isinstance(event, h11.EndOfMessage)
    return answer(body), client.trailing_data[0]


def parse_answers(data: bytes) -> list[Answer]:
    answers = []
    while data:
        heads = (head for head in data.lower().split(b"\r\n\r\n") if not head.startswith(b"http/1.1 100 "))
        head = next(heads, b"")
        # The server tells the method that it answers, except in a refusal, which is the last thing it says.
        is_head = b"x-method: head" in head or (b"x-answer" not in head and data.endswith(b"\r\n\r\n"))
        answer, data = parse_answer(data, b"HEAD" if is_head else b"GET")
        answers.append(answer)
    return answers


def check_case(case: Case, received: bytes) -> list[Answer]:
    answers = parse_answers(received)
    assert len(answers) >= case.num_whole
    for n, answer in enumerate(answers[: case.num_whole]):
        assert answer.status == 200
        assert json.loads(answer.body) == {"n": str(n), "body": "x" * (n * 50)}
    for answer in answers:
        if answer.status >= 400 and answer.headers.get(b"x-method") != b"HEAD" and answer.body:
            assert answer.headers[b"content-type"] == b"application/json"
            assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
    for answer in answers[:-1]:  # what the protocol itself refuses is the last
        assert b"x-answer" in answer.headers
    if answers and b"x-answer" not in answers[-1].headers:
        assert answers[-1].headers[b"connection"] == b"close"
        assert answers[-1].status in {400, 413, 431, 500, 501, 505}
    return answers


async def exchange(server: Server, case: Case) -> bytes:
    """What the connection gets, until the server closes it."""
    client = await server.connect()
    received = []

    async def read() -> None:
        received.append(await client.read_to_end())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for segment in case.segments():
            try:
                await client.send(segment)
            except trio.BrokenResourceError:
                break  # it was refused before
            await trio.sleep(0.001)
    client.close()
    return received[0]


async def run_cases(cases: list[Case]) -> None:
    application = CountingApplication()
    async with serving(
        application.app, keep_alive_timeout=1.0, max_header_bytes=4000, max_body_size=8000
    ) as server:
        frames = application.gate.let(1)
        neighbour = await server.connect()
        await neighbour.send(get("/gate"))
        await neighbour.read_head()
        received: dict[int, bytes] = {}

        async def run(index: int) -> None:
            received[index] = await exchange(server, cases[index])

        async with trio.open_nursery() as nursery:
            for index in range(len(cases)):
                nursery.start_soon(run, index)
                frames += application.gate.let(1)
                await trio.lowlevel.checkpoint()
        frames += application.gate.let(1)
        await trio.testing.wait_all_tasks_blocked()
        assert application.open == 1, "a request outlived its connection"
        application.gate.end()
        stream = b""
        while chunk := await neighbour.read_chunk():
            stream += chunk
        assert stream == frames
        numbers = []
        for index, case in enumerate(cases):
            numbers += [answer.headers.get(b"x-answer") for answer in check_case(case, received[index])]
        told = [number for number in numbers if number is not None]
        assert len(set(told)) == len(told), "a request was answered twice"


@contextmanager
def no_failure_in_the_log() -> Iterator[None]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("trioserve")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not [
        record.getMessage() for record in records if record.exc_info or record.levelno >= logging.WARNING
    ]


def check(cases: list[Case]) -> None:
    with no_failure_in_the_log():
        trio.run(run_cases, cases, clock=trio.testing.MockClock(autojump_threshold=0.003))


BROKEN_WHILE_ANSWERED = (
    b"POST /slow HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    b"zz\r\n\r\n",
)


@fuzzing
@example([Case(1, b"".join(BROKEN_WHILE_ANSWERED), (len(whole_request(0)), len(BROKEN_WHILE_ANSWERED[0])))])
@example([Case(0, b"HEaD /echo HTTP/1.1\r\nhost: x\r\n\r\n", ())])
@example([Case(0, b"HEAD /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n\r\n", ())])
@given(st.lists(cases, min_size=1, max_size=12))
def test_any_bytes(cases: list[Case]) -> None:
    check(cases)
