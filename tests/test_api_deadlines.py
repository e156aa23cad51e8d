"""The time limits of requests: who sets them, what they end, and what the client is told."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_api import Exchange
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app
from trioserve.server.request_scope import GRACE, App
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from fake_engine import FakeEngine
    from trioserve.server.request_stream import Unsent

COMPLETIONS = "/v1/completions"
BEAM = (COMPLETIONS, {"prompt": "Hi", "use_beam_search": True, "n": 2})
TEXT = (COMPLETIONS, {"prompt": "Hi"})
TEXTS = (COMPLETIONS, {"prompt": ["Hi", "there", "you"], "n": 2})
KINDS = pytest.mark.parametrize(("path", "request_fields"), [TEXT, TEXTS])
ALL_KINDS = pytest.mark.parametrize(("path", "request_fields"), [TEXT, TEXTS, BEAM])


def exchange_with(app: Any, path: str, request: Any, **headers: str) -> Exchange:
    dashed = {name.replace("_", "-"): value for name, value in headers.items()}
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    return Exchange(app, "POST", path, body, {"content-type": "application/json", **dashed})


async def ask(app: Any, path: str, request: Any, **headers: str) -> Exchange:
    exchange = exchange_with(app, path, request, **headers)
    with trio.fail_after(1000):  # on a mock clock nothing else would end it
        await exchange.run()
    return exchange


def check_freed(fake: FakeEngine, num_ended: int = 0) -> None:
    """Exactly what has not ended by itself was aborted, each sequence once."""
    expected = [add.request_id for add in fake.client.added[num_ended:]]
    assert sorted(fake.client.aborted) == expected
    assert fake.llm.num_open_requests == 0


def num_expired(fake: FakeEngine) -> float:
    (line,) = re.findall(
        r"^trioserve:requests_expired_total{.*} (.*)$", fake.llm.metrics.render().decode(), re.MULTILINE
    )
    return float(line)


def check_error_event(exchange: Exchange, code: str) -> list[Any]:
    """The stream ends in one error and one [DONE]; returns the events before."""
    *events, error, done = exchange.reply.events
    assert done == "[DONE]"
    assert error["error"]["code"] == code
    assert not any(event == "[DONE]" or "error" in event for event in events)
    return events


# Who sets the limit


@pytest.mark.parametrize(
    ("server", "header", "field", "expected"),
    [
        (8.0, None, None, 8.0),
        (None, "7.5", None, 7.5),
        (None, None, 6, 6.0),
        (3.0, "7", 6, 3.0),
        (9.0, "2", 6, 2.0),
        (9.0, "7", 0.5, 0.5),
        (9.0, ".25", None, 0.25),
        (9.0, "5.", None, 5.0),
    ],
)
async def test_the_least_limit_counts(
    fake: FakeEngine,
    autojump_clock: MockClock,
    server: float | None,
    header: str | None,
    field: float | None,
    expected: float,
) -> None:
    app = create_app(fake.llm, ServerArgs(request_timeout=server))
    started = trio.current_time()
    headers = {} if header is None else {"x_request_timeout": header}
    reply = (await ask(app, COMPLETIONS, {"prompt": "Hi", "timeout": field}, **headers)).reply
    assert (reply.status, reply.error["code"], reply.error["type"]) == (
        504,
        "deadline_exceeded",
        "timeout_error",
    )
    assert trio.current_time() - started == pytest.approx(expected)
    assert fake.client.added[0].time_left == pytest.approx(expected)


async def test_without_a_limit_there_is_none(fake: FakeEngine, autojump_clock: MockClock) -> None:
    app = create_app(fake.llm)
    exchange = exchange_with(app, COMPLETIONS, {"prompt": "Hi", "timeout": None})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(80_000)
        (add,) = fake.client.added
        assert add.time_left is None
        fake.client.emit(add, "ok", FinishReason.LENGTH)
    assert exchange.reply.status == 200


@pytest.mark.parametrize(
    "value", ["", "0", "0.0", "-1", "+1", "1e3", "inf", "nan", "1 s", "1,5", "٣", "9" * 99]
)
async def test_a_wrong_header_is_named(fake: FakeEngine, autojump_clock: MockClock, value: str) -> None:
    exchange = exchange_with(create_app(fake.llm), COMPLETIONS, {"prompt": "Hi"})
    exchange._scope["headers"].append((b"x-request-timeout", value.encode()))
    await exchange.run()
    assert (exchange.reply.status, exchange.reply.error["param"]) == (400, "X-Request-Timeout")
    assert "positive decimal number of seconds" in exchange.reply.error["message"]
    assert not fake.client.added


async def test_of_two_headers_the_least_counts(fake: FakeEngine, autojump_clock: MockClock) -> None:
    exchange = exchange_with(create_app(fake.llm), COMPLETIONS, {"prompt": "Hi"}, x_request_timeout="9")
    exchange._scope["headers"].append((b"x-request-timeout", b"4"))
    await exchange.run()
    assert fake.client.added[0].time_left == pytest.approx(4)


@pytest.mark.parametrize("value", [0, -1, "5", True, [], 1e400])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_a_wrong_field_is_named(
    fake: FakeEngine, autojump_clock: MockClock, path: str, value: Any
) -> None:
    request = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "timeout": value}
    body = json.dumps(request).replace("Infinity", "1e400").encode()
    reply = (await ask(create_app(fake.llm), path, body)).reply
    assert reply.status == 400
    assert not fake.client.added


async def test_a_wrong_field_says_what_is_allowed(fake: FakeEngine, autojump_clock: MockClock) -> None:
    reply = (await ask(create_app(fake.llm), COMPLETIONS, {"prompt": "Hi", "timeout": 0})).reply
    assert reply.error["param"] == "timeout"
    assert reply.error["message"] == "timeout must be a number of seconds > 0, got 0.0."


# What it ends


@ALL_KINDS
async def test_a_whole_reply_is_a_504_and_the_engine_is_free(
    fake: FakeEngine, autojump_clock: MockClock, path: str, request_fields: dict[str, Any]
) -> None:
    reply = (await ask(create_app(fake.llm), path, request_fields, x_request_timeout="5")).reply
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert reply.headers["x-request-id"]
    assert {add.time_left for add in fake.client.added} == {5.0}
    check_freed(fake)
    assert num_expired(fake) == 1


@KINDS
async def test_a_stream_without_a_token_is_a_504(
    fake: FakeEngine, autojump_clock: MockClock, path: str, request_fields: dict[str, Any]
) -> None:
    exchange = await ask(create_app(fake.llm), path, request_fields | {"stream": True, "timeout": 5})
    assert (exchange.reply.status, exchange.reply.error["code"]) == (504, "deadline_exceeded")
    check_freed(fake)


@KINDS
async def test_a_stream_ends_in_an_error_event(
    fake: FakeEngine, autojump_clock: MockClock, path: str, request_fields: dict[str, Any]
) -> None:
    app = create_app(fake.llm)
    options = {"stream": True, "stream_options": {"include_usage": True}, "timeout": 5}
    exchange = exchange_with(app, path, request_fields | options)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(4)
        fake.client.emit(
            fake.client.added[0], "ab", FinishReason.LENGTH if len(fake.client.added) > 1 else None
        )
    assert trio.current_time() == pytest.approx(5)
    events = check_error_event(exchange, "deadline_exceeded")
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    assert all(event["usage"] is None for event in events), "an answer in parts has no total"
    check_freed(fake, num_ended=len(fake.client.added) > 1)
    assert num_expired(fake) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_may_end_it_first(fake: FakeEngine, autojump_clock: MockClock, stream: bool) -> None:
    """As under the policy "deadline"."""
    exchange = exchange_with(
        create_app(fake.llm), COMPLETIONS, {"prompt": "Hi", "stream": stream, "timeout": 9}
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], "ab")
        await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], "c", FinishReason.DEADLINE)
    if stream:
        check_error_event(exchange, "deadline_exceeded")
    else:
        assert (exchange.reply.status, exchange.reply.error["code"]) == (504, "deadline_exceeded")
    assert trio.current_time() < 9


async def test_no_other_request_is_touched(fake: FakeEngine, autojump_clock: MockClock) -> None:
    app = create_app(fake.llm)
    short = exchange_with(app, COMPLETIONS, {"prompt": "short", "stream": True, "timeout": 2})
    long = exchange_with(app, COMPLETIONS, {"prompt": "long", "stream": True})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(long.run)
        await wait_all_tasks_blocked()
        nursery.start_soon(short.run)
        await wait_all_tasks_blocked()
        of_long, of_short = fake.client.added
        fake.client.emit_step([(of_long, "a", None, None), (of_short, "a", None, None)])
        await trio.sleep(3)
        check_error_event(short, "deadline_exceeded")
        assert fake.client.aborted == [of_short.request_id]
        fake.client.emit(of_long, "b", FinishReason.LENGTH)
    *events, done = long.reply.events
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    assert done == "[DONE]"


# The body


class SlowBody(Exchange):
    """A request whose body comes in two halves, the second one `delay` seconds later."""

    def __init__(self, app: App, request: Any, delay: float, **headers: str) -> None:
        body = json.dumps(request).encode()
        super().__init__(app, "POST", COMPLETIONS, body, {"content-type": "application/json", **headers})
        self._delay = delay
        middle = len(body) // 2
        self._messages = [
            {"type": "http.request", "body": body[middle:], "more_body": False},
            {"type": "http.request", "body": body[:middle], "more_body": True},
        ]

    async def _receive(self) -> dict[str, Any]:
        if len(self._messages) == 1:
            await trio.sleep(self._delay)
        return await super()._receive()


@pytest.mark.parametrize(
    ("limit", "status", "code", "seconds"),
    [("30", 504, "deadline_exceeded", 30), ("90", 408, "request_timeout", 60)],
)
async def test_a_slow_body_meets_the_first_of_its_limits(
    fake: FakeEngine, autojump_clock: MockClock, limit: str, status: int, code: str, seconds: float
) -> None:
    exchange = SlowBody(create_app(fake.llm), {"prompt": "Hi"}, 1000, **{"x-request-timeout": limit})
    await exchange.run()
    assert (exchange.reply.status, exchange.reply.error["code"]) == (status, code)
    assert trio.current_time() == pytest.approx(seconds)


async def test_the_time_of_the_body_counts(fake: FakeEngine, autojump_clock: MockClock) -> None:
    exchange = SlowBody(create_app(fake.llm), {"prompt": "Hi", "timeout": 7}, 5)
    await exchange.run()
    assert exchange.reply.status == 504
    assert fake.client.added[0].time_left == pytest.approx(2)
    assert trio.current_time() == pytest.approx(7)


async def test_a_body_that_comes_too_late_for_its_own_limit(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    exchange = SlowBody(create_app(fake.llm), {"prompt": "Hi", "timeout": 3}, 5)
    await exchange.run()
    assert exchange.reply.status == 504
    check_freed(fake)


async def test_a_deadline_while_the_prompt_is_tokenized(
    fake: FakeEngine, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    tokenize = fake.llm._requests.inputs.tokenize

    async def tokenize_in_a_thread(prompt: Any) -> Any:
        await trio.to_thread.run_sync(go_on.wait)
        return await tokenize(prompt)

    monkeypatch.setattr(fake.llm._requests.inputs, "tokenize", tokenize_in_a_thread)
    exchange = exchange_with(create_app(fake.llm), COMPLETIONS, {"prompt": "Hi", "timeout": 1})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(2)
        go_on.set()
    assert exchange.reply.status == 504
    check_freed(fake)


async def test_a_deadline_while_many_prompts_are_submitted(
    fake: FakeEngine, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = fake.client.add

    def add_slowly(request: Any) -> None:
        add(request)
        autojump_clock.jump(1)

    monkeypatch.setattr(fake.client, "add", add_slowly)
    reply = (await ask(create_app(fake.llm), COMPLETIONS, {"prompt": ["Hi"] * 100, "timeout": 5})).reply
    assert reply.status == 504
    assert len(fake.client.added) == 5
    check_freed(fake)


# At the same moment


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", range(12))
async def test_an_answer_that_ends_at_the_deadline_has_one_end(
    fake: FakeEngine, autojump_clock: MockClock, num_steps: int, stream: bool
) -> None:
    exchange = exchange_with(
        create_app(fake.llm), COMPLETIONS, {"prompt": "Hi", "stream": stream, "timeout": 5}
    )

    async def end_at_the_deadline() -> None:
        await trio.sleep_until(5)
        for _ in range(num_steps):
            await trio.lowlevel.checkpoint()
        fake.client.emit(fake.client.added[0], "b", FinishReason.LENGTH)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_at_the_deadline)
        nursery.start_soon(exchange.run)
        await trio.sleep(1)
        fake.client.emit(fake.client.added[0], "a")
    reply = exchange.reply
    if not stream:
        assert reply.status == (200 if "choices" in reply.json else 504)
    elif "error" in reply.events[-2]:
        check_error_event(exchange, "deadline_exceeded")
    else:
        assert [event["choices"][0]["text"] for event in reply.events[:-1]] == ["a", "b"]
        assert reply.events.count("[DONE]") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_leaves_at_the_deadline(
    fake: FakeEngine, autojump_clock: MockClock, stream: bool
) -> None:
    exchange = exchange_with(
        create_app(fake.llm), COMPLETIONS, {"prompt": "Hi", "stream": stream, "timeout": 5}
    )

    async def leave() -> None:
        await trio.sleep_until(5)
        exchange.leave()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        nursery.start_soon(exchange.run)
        await trio.sleep(1)
        fake.client.emit(fake.client.added[0], "a")
    check_freed(fake)


# A client that does not read


class StalledClient(Exchange):
    """From its second part on, each write takes until `reads` is set."""

    def __init__(self, app: App, timeout: float) -> None:
        request = {"prompt": "Hi", "stream": True, "timeout": timeout}
        body = json.dumps(request).encode()
        super().__init__(app, "POST", COMPLETIONS, body, {"content-type": "application/json"})
        self.reads = trio.Event()

    async def _send(self, message: dict[str, Any]) -> None:
        if len(self._sent) >= 2:
            await self.reads.wait()
        await super()._send(message)

    def _send_now(self, part: bytes) -> Unsent:
        return partial(self._send, {"type": "http.response.body", "body": part, "more_body": True})


async def stall(fake: FakeEngine, finish: FinishReason | None, then: Callable[[], Any]) -> StalledClient:
    """A write that is blocked from second 1 on, with a deadline at 5; `then` is called at 4."""
    client = StalledClient(create_app(fake.llm, ServerArgs(sse_keep_alive_interval=0)), timeout=5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], "a")
        await trio.sleep_until(1)
        fake.client.emit(fake.client.added[0], "b", finish)
        await trio.sleep_until(4)
        nursery.start_soon(then, client)
        await trio.sleep_until(5 + GRACE / 2)
        if finish is None:
            check_freed(fake)
    assert fake.llm.num_open_requests == 0
    return client


async def test_a_blocked_write_does_not_keep_the_engine_busy(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    async def never(_: StalledClient) -> None:
        await trio.lowlevel.checkpoint()

    client = await stall(fake, None, never)
    assert trio.current_time() == pytest.approx(5 + GRACE)
    assert len(client._sent) == 2, "nothing was written after the deadline, not even a proper end"


async def test_a_client_that_reads_again_in_the_grace_is_told(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    async def read_late(client: StalledClient) -> None:
        await trio.sleep_until(5 + GRACE * 0.75)
        client.reads.set()

    client = await stall(fake, None, read_late)
    check_error_event(client, "deadline_exceeded")


async def test_an_answer_that_is_whole_is_written_after_the_deadline(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    async def read_late(client: StalledClient) -> None:
        await trio.sleep_until(60)
        client.reads.set()

    client = await stall(fake, FinishReason.LENGTH, read_late)
    assert [event["choices"][0]["text"] for event in client.reply.events[:-1]] == ["a", "b"]
    assert client.reply.events[-1] == "[DONE]"


# A shutdown is a deadline of all requests


async def test_a_shutdown_ends_requests_with_an_error_of_its_own(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    app = create_app(fake.llm)
    stream = exchange_with(app, COMPLETIONS, {"prompt": "Hi", "stream": True, "timeout": 100})
    whole = exchange_with(app, COMPLETIONS, {"prompt": "Hi"})
    sooner = exchange_with(app, COMPLETIONS, {"prompt": "Hi", "timeout": 3})
    later = exchange_with(app, COMPLETIONS, {"prompt": "Hi"})
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = 100
        for exchange in (stream, whole, sooner):
            nursery.start_soon(exchange.run)
            await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], "a")
        await trio.sleep_until(1)
        app.end_requests(10.0)
        await trio.sleep_until(9)
        nursery.start_soon(later.run)
    assert trio.current_time() == pytest.approx(10)
    check_error_event(stream, "shutting_down")
    assert (sooner.reply.status, sooner.reply.error["code"]) == (504, "deadline_exceeded")
    for exchange in (whole, later):
        assert (exchange.reply.status, exchange.reply.error["code"]) == (503, "shutting_down")
    check_freed(fake)


class EagerClient(Exchange):
    """Takes each part at once, and lets a cancellation in after that."""

    async def _send(self, message: dict[str, Any]) -> None:
        self._sent.append(message)
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("num_steps", range(8))
async def test_an_answer_that_ends_at_the_shutdown_has_one_end(
    fake: FakeEngine, autojump_clock: MockClock, num_steps: int
) -> None:
    app = create_app(fake.llm)
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    exchange = EagerClient(app, "POST", COMPLETIONS, body, {"content-type": "application/json"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], "a")
        await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], "b", FinishReason.LENGTH)
        for _ in range(num_steps):
            await trio.lowlevel.checkpoint()
        app.end_requests(trio.current_time())
    if "error" in exchange.reply.events[-2]:
        check_error_event(exchange, "shutting_down")
    else:
        *events, done = exchange.reply.events
        assert [event["choices"][0]["text"] for event in events] == ["a", "b"]
        assert done == "[DONE]"


async def test_what_ends_before_the_shutdown_is_whole(fake: FakeEngine, autojump_clock: MockClock) -> None:
    app = create_app(fake.llm)
    exchange = exchange_with(app, COMPLETIONS, {"prompt": "Hi", "stream": True})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        app.end_requests(10.0)
        fake.client.emit(fake.client.added[0], "a", FinishReason.LENGTH)
    assert exchange.reply.events[-1] == "[DONE]"
    assert len(exchange.reply.events) == 2
