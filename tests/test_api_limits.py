"""What is decided about a request before its body is read: how many at a time, and how many in a minute."""

from __future__ import annotations

import json
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_api import Answer, Client, Exchange, FakeLLM, Reply
from trioserve.errors import EngineDeadError, EngineRestartingError, OverloadedError
from trioserve.server.rate_window import RateWindow
from trioserve.server.request_limits import RequestLimits
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATHS = ["/v1/completions", "/v1/chat/completions"]
TEXT = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
JSON = {"content-type": "application/json"}
KEYS = ("a-key", "b-key")


def begin(client: Client, content: Any, key: str | None = None, path: str = PATHS[0]) -> Exchange:
    """A request that is not run yet. Content that is None never comes."""
    body = None if content is None else json.dumps(content).encode()
    headers = JSON if key is None else {**JSON, "authorization": f"Bearer {key}"}
    return Exchange(client.app, "POST", path, body, headers)


async def ask(client: Client, key: str | None = None, path: str = PATHS[0]) -> Reply:
    exchange = begin(client, TEXT, key, path)
    with trio.fail_after(5):
        await exchange.run()
    return exchange.reply


@asynccontextmanager
async def held(client: Client, *exchanges: Exchange) -> AsyncIterator[None]:
    """These requests are under way, each as far as it comes; then their clients leave."""
    async with trio.open_nursery() as nursery:
        for exchange in exchanges:
            nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        yield
        for exchange in exchanges:
            exchange.leave()


def silent() -> FakeLLM:
    llm = FakeLLM()
    llm.outputs_left = 0
    return llm


def refusals(llm: FakeLLM) -> dict[str, float]:
    prefix = "trioserve:requests_refused_total{"
    lines = [line for line in llm.metrics.render().decode().splitlines() if line.startswith(prefix)]
    numbers = {
        line.partition('reason="')[2].partition('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines
    }
    return {reason: number for reason, number in numbers.items() if number}


# At a time


@pytest.mark.parametrize("path", PATHS)
async def test_the_server_takes_so_many_at_a_time(path: str) -> None:
    llm = silent()
    client = Client(llm, ServerArgs(max_concurrent_requests=2))
    async with held(client, begin(client, TEXT), begin(client, TEXT, path=PATHS[1])):
        reply = await ask(client, path=path)
        assert (reply.status, reply.error["code"], reply.error["type"]) == (503, "overloaded", "server_error")
        assert reply.headers["retry-after"] == "1"
        assert len(llm.calls) == 2
    llm.outputs_left = None
    assert (await ask(client, path=path)).status == 200
    assert refusals(llm) == {"server_concurrency": 1}


async def test_a_key_has_so_many_at_a_time() -> None:
    llm = silent()
    client = Client(llm, ServerArgs(api_key=KEYS, max_concurrent_requests_per_key=1))
    async with held(client, begin(client, TEXT, "a-key")):
        reply = await ask(client, "a-key")
        assert (reply.status, reply.error["code"], reply.error["type"]) == (
            429,
            "rate_limit_exceeded",
            "requests",
        )
        assert reply.headers["retry-after"] == "1"
        llm.outputs_left = None
        assert (await ask(client, "b-key")).status == 200
    assert (await ask(client, "a-key")).status == 200
    assert refusals(llm) == {"client_concurrency": 1}


async def test_without_keys_each_address_has_its_own() -> None:
    llm = silent()
    client = Client(llm, ServerArgs(max_concurrent_requests_per_key=1))
    body = json.dumps(TEXT).encode()
    peers = [("10.0.0.1", 1), ("10.0.0.1", 2), ("10.0.0.2", 1)]
    exchanges = [Exchange(client.app, "POST", PATHS[0], body, JSON, peer=peer) for peer in peers]
    async with held(client, *exchanges):
        assert len(llm.running) == 2


async def test_nothing_else_needs_a_place() -> None:
    client = Client(silent(), ServerArgs(max_concurrent_requests=1, max_requests_per_minute_per_key=1))
    async with held(client, begin(client, TEXT)):
        for path in ("/v1/models", "/health", "/health/ready", "/metrics", "/version"):
            assert (await client.get(path)).status == 200


@pytest.mark.parametrize("body_comes", [False, True])
async def test_it_is_refused_before_its_body_is_read(body_comes: bool) -> None:
    client = Client(silent(), ServerArgs(max_concurrent_requests=1))
    async with held(client, begin(client, TEXT)):
        late = begin(client, "no object" if body_comes else None)
        with trio.fail_after(5):
            await late.run()
        assert late.reply.status == 503


@pytest.mark.parametrize(
    ("content", "stream", "outputs"),
    [(None, False, 0), (TEXT, False, 0), (TEXT, True, 0), (TEXT, True, 1)],
    ids=["no body yet", "in the handler", "before the first token", "in the stream"],
)
async def test_a_place_is_free_once_its_client_has_left(content: Any, stream: bool, outputs: int) -> None:
    llm = FakeLLM()
    llm.outputs_left = outputs
    client = Client(llm, ServerArgs(max_concurrent_requests=1, max_concurrent_requests_per_key=1))
    async with held(client, begin(client, content and {**content, "stream": stream})):
        assert (await ask(client)).status == 429
    llm.outputs_left = None
    assert (await ask(client)).status == 200


@pytest.mark.parametrize("failure", ["body", "engine", "bug", "timeout"])
async def test_a_place_is_free_once_its_request_has_failed(
    failure: str, autojump_clock: trio.testing.MockClock
) -> None:
    error = EngineDeadError("gone") if failure == "engine" else ZeroDivisionError()
    llm = FakeLLM(Answer(error=error if failure in {"engine", "bug"} else None))
    client = Client(llm, ServerArgs(max_concurrent_requests_per_key=1, body_timeout=3))
    content = {"body": {}, "timeout": None}.get(failure, TEXT)
    for _ in range(2):
        exchange = begin(client, content)
        await exchange.run()
        expected = {"body": 400, "timeout": 408}.get(failure, 500)
        assert exchange.reply.status == expected


# In a minute


async def test_a_key_may_begin_so_many_in_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    llm = FakeLLM()
    client = Client(llm, ServerArgs(api_key=KEYS, max_requests_per_minute_per_key=3))
    for pause in (0, 10, 10.5):
        await trio.sleep(pause)
        assert (await ask(client, "a-key")).status == 200
    reply = await ask(client, "a-key", PATHS[1])
    assert (reply.status, reply.error["code"], reply.error["type"]) == (
        429,
        "rate_limit_exceeded",
        "requests",
    )
    assert reply.headers["retry-after"] == "40"  # 60 - 20.5, in whole seconds
    assert (await ask(client, "b-key")).status == 200
    await trio.sleep(39)
    assert (await ask(client, "a-key")).status == 429
    await trio.sleep(1)
    assert (await ask(client, "a-key")).status == 200  # what was refused did not count
    assert (await ask(client, "a-key")).headers["retry-after"] == "10"
    assert refusals(llm) == {"client_rate": 3}


async def test_a_request_that_fails_counts_too(autojump_clock: trio.testing.MockClock) -> None:
    client = Client(FakeLLM(), ServerArgs(max_requests_per_minute_per_key=1))
    assert (await client.post(PATHS[0], {})).status == 400
    assert (await ask(client)).status == 429


@pytest.mark.parametrize("seed", range(20))
def test_no_minute_has_more_and_the_wait_is_true(seed: int) -> None:
    chance = random.Random(seed)
    limit = chance.randint(1, 6)
    window, now = RateWindow(limit), 0.0
    let_in: list[float] = []
    for _ in range(400):
        now += chance.choice([0.0, 0.0, chance.expovariate(limit / 30)])
        recent = [time for time in let_in if time > now - 60]
        wait = window.wait("a", now)
        assert (wait > 0) == (len(recent) == limit)
        if wait:
            assert window.wait("a", now + wait) == pytest.approx(0, abs=1e-6)
            assert window.wait("a", now + wait * 0.999) > 0
        else:
            window.count("a", now)
            let_in.append(now)


async def test_idle_clients_are_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    limits = RequestLimits(5, 5, 5)
    for number in range(1000):
        limits.enter(f"client {number}")
        limits.leave(f"client {number}")
    assert limits.num_clients == 1000  # they still count for the minute
    await trio.sleep(61)
    limits.enter("one more")
    assert (limits.num_clients, limits.num_running) == (1, 1)


def test_a_hundred_thousand_addresses() -> None:
    """They are forgotten in linear time; in quadratic time, this takes many seconds."""
    window = RateWindow(2)
    for number in range(100_000):
        window.count(f"address:{number}", number / 2000)
        if number % 3 == 0:
            window.count("address:0", number / 2000)
    assert window.num_clients == 100_000
    assert window.wait("address:0", 50) == pytest.approx(60, abs=0.01)
    window.count("address:0", 109.9)
    assert window.num_clients < 300
    window.count("address:new", 170)
    assert window.num_clients == 1


# The engine


async def test_a_full_engine_is_asked_before_the_body_is_read() -> None:
    llm = FakeLLM()
    llm.no_room = OverloadedError("Too many wait.", retry_after=2.2)
    client = Client(llm, ServerArgs(max_requests_per_minute_per_key=1))
    late = begin(client, None)
    with trio.fail_after(5):
        await late.run()
    assert (late.reply.status, late.reply.error["code"]) == (503, "overloaded")
    assert late.reply.headers["retry-after"] == "3"
    llm.no_room = None
    assert (await ask(client)).status == 200  # what the engine refused does not count for the minute


@pytest.mark.parametrize(
    ("path", "fields", "number"),
    [
        (PATHS[0], {"prompt": ["a", "b", "c"], "n": 4}, 12),
        (PATHS[0], {"prompt": [1, 2, 3], "n": 4}, 4),
        (PATHS[0], {"prompt": ["a", "b", "c"], "n": 4, "use_beam_search": True}, 4),
        (PATHS[1], {"n": 4}, 4),
        (PATHS[1], {}, 1),
    ],
)
async def test_the_engine_is_asked_for_room_for_all_before_any_work(
    path: str, fields: dict[str, Any], number: int
) -> None:
    llm = FakeLLM()
    llm.room = number - 1
    reply = await Client(llm).post(path, {**TEXT, **fields})
    assert (reply.status, reply.error["code"]) == (503, "overloaded")
    assert not llm.calls
    assert not llm.rendered
    llm.room = number
    assert (await Client(llm).post(path, {**TEXT, **fields})).status == 200


async def test_an_engine_that_restarts(caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    llm.no_room = EngineRestartingError("/usr/lib/cuda fell over", retry_after=0.1)
    reply = await ask(Client(llm))
    assert (reply.status, reply.error["code"]) == (503, "engine_restarting")
    assert reply.headers["retry-after"] == "1"
    assert "cuda" not in reply.error["message"]


async def test_who_is_over_its_own_limit_is_told_so_first() -> None:
    llm = silent()
    client = Client(llm, ServerArgs(max_concurrent_requests=1, max_concurrent_requests_per_key=1))
    async with held(client, begin(client, TEXT)):
        llm.no_room = OverloadedError("Too many wait.")
        assert (await ask(client)).status == 429
