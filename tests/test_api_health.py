"""Health, readiness and liveness: one round trip to the engine for all who ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_api import Client, Exchange, FakeLLM
from trioserve.errors import ClosedError, EngineDeadError, EngineRestartingError
from trioserve.server.app import create_app
from trioserve.server.single_flight import SingleFlight
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from helpers_api import Reply

CHECKS = ["/health", "/ping", "/health/ready"]


class Pings:
    """Round trips that end when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.under_way = 0
        self.most_under_way = 0
        self.answer = trio.Event()

    async def __call__(self) -> None:
        self.begun += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.answer.wait()
        finally:
            self.under_way -= 1


def client_of(check: Callable[[], Awaitable[None]], args: ServerArgs | None = None) -> Client:
    llm = FakeLLM()
    llm.health = check
    return Client(llm, args)


def probe(client: Client, path: str = "/health") -> Exchange:
    return Exchange(client.app, "GET", path, b"", {})


async def failing(error: Exception, path: str) -> Reply:
    async def fail() -> None:
        raise error

    return await client_of(fail).get(path)


@pytest.mark.parametrize("path", ["/health", "/ping", "/health/ready", "/health/live"])
async def test_healthy(path: str) -> None:
    reply = await Client(FakeLLM()).get(path)
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize("path", CHECKS)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDeadError("gone"), "down"),
        (ClosedError("closed"), "down"),
        (EngineRestartingError("later"), "restarting"),
    ],
)
async def test_unhealthy(path: str, error: Exception, code: str) -> None:
    reply = await failing(error, path)
    assert reply.status == 503
    if path == "/health/ready":
        assert (reply.error["type"], reply.error["code"]) == ("server_error", code)
    else:
        assert not reply.body


async def test_a_server_that_drains_is_healthy_and_not_ready() -> None:
    drained = [False]
    llm = FakeLLM()
    client = Client(llm)
    client.app = create_app(llm, is_draining=lambda: drained[0])  # type: ignore[arg-type]  # a fake
    assert (await client.get("/health/ready")).status == 200
    drained[0] = True
    reply = await client.get("/health/ready")
    assert (reply.status, reply.error["code"]) == (503, "draining")
    assert (await client.get("/health")).status == 200


async def test_alive_unless_dead_for_good() -> None:
    pings = Pings()
    client = client_of(pings)  # it never answers, which /health/live does not ask for
    llm = FakeLLM()
    for errored in (False, True):
        llm.errored = errored
        assert (await Client(llm).get("/health/live")).status == (503 if errored else 200)
    with trio.fail_after(5):
        assert (await client.get("/health/live")).status == 200
    assert not pings.begun


@pytest.mark.parametrize("path", CHECKS)
async def test_an_engine_that_does_not_answer_in_time(
    path: str, autojump_clock: trio.testing.MockClock
) -> None:
    client = client_of(trio.sleep_forever, ServerArgs(health_timeout=2))
    started = trio.current_time()
    reply = await client.get(path)
    assert reply.status == 503
    assert trio.current_time() - started == pytest.approx(2)
    if path == "/health/ready":
        assert reply.error["code"] == "not_answering"


async def test_many_probes_are_one_round_trip() -> None:
    pings = Pings()
    client = client_of(pings)
    probes = [probe(client, CHECKS[number % 3]) for number in range(30)]
    async with trio.open_nursery() as nursery:
        for each in probes:
            nursery.start_soon(each.run)
        await wait_all_tasks_blocked()
        pings.answer.set()
    assert {each.reply.status for each in probes} == {200}
    assert pings.begun == 1
    await client.get("/health")
    assert pings.begun == 2, "an answer is not kept for later"


async def test_a_probe_that_leaves_takes_nobody_with_it(autojump_clock: trio.testing.MockClock) -> None:
    pings = Pings()
    client = client_of(pings)
    probes = [probe(client) for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for each in probes:
            nursery.start_soon(each.run)
            await wait_all_tasks_blocked()
        probes[0].leave()
        await trio.sleep(1)
        assert (pings.begun, pings.under_way) == (2, 1), "the next one has taken over"
        probes[1].leave()
        await trio.sleep(1)
        pings.answer.set()
    assert probes[2].reply.status == 200
    assert (pings.under_way, pings.most_under_way) == (0, 1)


async def test_each_probe_has_its_own_time(autojump_clock: trio.testing.MockClock) -> None:
    pings = Pings()
    client = client_of(pings, ServerArgs(health_timeout=5))
    early, late = probe(client), probe(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(early.run)
        await trio.sleep(4)
        nursery.start_soon(late.run)
        await trio.sleep(2)
        assert early.reply.status == 503
        pings.answer.set()
    assert late.reply.status == 200


async def test_nothing_piles_up_at_an_engine_that_is_stuck(autojump_clock: trio.testing.MockClock) -> None:
    """Clients that come and go in a hurry: pings wait in the engine's socket, so there must be few."""
    pings = Pings()
    client = client_of(pings, ServerArgs(health_timeout=5))
    for _ in range(1000):
        async with trio.open_nursery() as nursery:
            each = probe(client)
            nursery.start_soon(each.run)
            await trio.sleep(0.01)
            each.leave()
    assert pings.begun <= 10 / 0.25 + 1
    assert pings.under_way == 0
    pings.answer.set()
    assert (await client.get("/health")).status == 200


async def test_an_engine_that_answers_is_asked_without_delay(autojump_clock: trio.testing.MockClock) -> None:
    client = Client(FakeLLM())
    started = trio.current_time()
    for _ in range(10):
        assert (await client.get("/health")).status == 200
    assert trio.current_time() == started


# The single flight by itself


async def test_an_error_is_told_to_the_one_who_ran_into_it() -> None:
    results: list[int | Exception] = [ZeroDivisionError(), 7]

    async def operate() -> int:
        await wait_all_tasks_blocked()
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    flight = SingleFlight(operate)
    told: list[object] = []

    async def ask() -> None:
        try:
            told.append(await flight.run())
        except ZeroDivisionError as error:
            told.append(type(error))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(ask)
    assert told[0] is ZeroDivisionError
    assert told[1:] == [7, 7, 7]
