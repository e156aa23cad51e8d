"""Background responses, where two things happen at once: ends, stores that take their time, faults."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_responses import PATH, Api, PacedLLM, names, read_events, serving
from trioserve.server.responses.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioserve.server.responses.store import StoredResponse

NUM_OUTPUTS = 3  # of the fake's usual answer


class SlowStore:
    """Stands before `MemoryStore.put`, which waits while the gate is closed, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = trio.Event()
        self.gate.set()
        self.faults = 0
        """So many calls fail, in a way that no store should."""
        put = MemoryStore.put

        async def put_slowly(store: MemoryStore, stored: StoredResponse) -> None:
            await self.gate.wait()
            if self.faults:
                self.faults -= 1
                raise RuntimeError("a fault of the program")
            await put(store, stored)

        monkeypatch.setattr(MemoryStore, "put", put_slowly)

    def close(self) -> None:
        self.gate = trio.Event()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    return SlowStore(monkeypatch)


@asynccontextmanager
async def paced(**server_args: object) -> AsyncIterator[tuple[Api, PacedLLM]]:
    llm = PacedLLM()
    async with serving(llm, **server_args) as api:
        yield api, llm


async def begin(api: Api) -> str:
    response_id: str = (await api.create(background=True)).json["id"]
    await wait_all_tasks_blocked()
    return response_id


def num_kept(api: Api) -> int:
    assert isinstance(api.store, MemoryStore)
    return api.store.num_responses


async def test_whoever_has_an_id_can_find_it_after_a_crash(slow: SlowStore) -> None:
    async with paced() as (api, llm), trio.open_nursery() as nursery:
        slow.close()
        exchange = api.exchange("POST", PATH, {"input": "Hi", "background": True, "stream": True})
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        assert exchange.received == b""
        slow.gate.set()
        await wait_all_tasks_blocked()
        assert names(read_events(exchange.received)) == ["created", "queued"]
        assert num_kept(api) == 1
        llm.let(NUM_OUTPUTS)


async def test_whoever_sees_its_end_can_go_on_from_it(slow: SlowStore) -> None:
    async with paced() as (api, llm):
        response_id = await begin(api)
        slow.close()
        llm.let(NUM_OUTPUTS)
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            exchange = api.exchange("GET", f"{PATH}/{response_id}")
            nursery.start_soon(exchange.run)
            await wait_all_tasks_blocked()
            assert exchange.received == b""
            slow.gate.set()
        assert exchange.reply.json["status"] == "completed"
        llm.let(NUM_OUTPUTS)
        assert (await api.create(previous_response_id=response_id)).status == 200


@pytest.mark.parametrize("num_steps", range(8))
async def test_a_client_that_deletes_and_leaves(slow: SlowStore, num_steps: int) -> None:
    """Deleted or not: nothing is left that says for ever that it is under way."""
    async with paced() as (api, llm):
        response_id = await begin(api)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(api.delete, response_id)
                for _ in range(num_steps):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        await wait_all_tasks_blocked()
        if api.background.num_running:
            assert len(llm.running) == 1
            await api.cancel(response_id)
        else:
            assert (await api.get(response_id)).status == 404
            assert num_kept(api) == 0
        assert not llm.running


async def test_one_that_is_deleted_while_its_end_is_stored(slow: SlowStore) -> None:
    async with paced() as (api, llm):
        response_id = await begin(api)
        slow.close()
        llm.let(NUM_OUTPUTS)
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(api.delete, response_id)
                await wait_all_tasks_blocked()
                scope.cancel()
        slow.gate.set()
        await api.background.wait_idle()
        assert num_kept(api) == 0


async def test_one_that_is_cancelled_while_its_end_is_stored_has_ended(slow: SlowStore) -> None:
    async with paced() as (api, llm):
        response_id = await begin(api)
        slow.close()
        llm.let(NUM_OUTPUTS)
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            exchange = api.exchange("POST", f"{PATH}/{response_id}/cancel")
            nursery.start_soon(exchange.run)
            await wait_all_tasks_blocked()
            slow.gate.set()
        assert exchange.reply.json["status"] == "completed"
        assert (await api.get(response_id)).json == exchange.reply.json


async def test_the_input_of_one_that_was_evicted_is_known_while_it_runs() -> None:
    async with paced(responses_store_max_responses=1) as (api, _):
        first, second = await begin(api), await begin(api)
        for response_id in (first, second):
            (item,) = (await api.items(response_id)).json["data"]
            assert item["content"][0]["text"] == "Hi there"
            assert (await api.get(response_id)).json["status"] == "queued"
        await api.cancel(second)
        await api.cancel(first)
        assert (await api.get(first)).json["status"] == "cancelled"
        assert (await api.get(second)).status == 404


async def test_a_fault_ends_one_response_and_no_other(
    slow: SlowStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with paced() as (api, llm):
        good = await begin(api)
        bad = await begin(api)
        async with trio.open_nursery() as nursery:
            exchange = api.exchange("GET", f"{PATH}/{bad}", query="stream=true")
            nursery.start_soon(exchange.run)
            await wait_all_tasks_blocked()
            slow.faults = 1
            await api.cancel(bad)
        assert names(read_events(exchange.received))[-1] == "error"
        assert "a fault of the program" in caplog.text
        llm.let(NUM_OUTPUTS)
        await api.background.wait_idle()
        assert (await api.get(good)).json["status"] == "completed"


async def test_a_fault_at_the_beginning_is_a_failure(slow: SlowStore) -> None:
    async with paced() as (api, _):
        slow.faults = 1
        response_id = (await api.create(background=True)).json["id"]
        await api.background.wait_idle()
        response = (await api.get(response_id)).json
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert "of the program" not in str(response)
