"""Responses over a socket: outputs are written in the task that brings them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from trio.testing import wait_all_tasks_blocked

from helpers_complaints import http_request, until
from helpers_http import serving
from helpers_responses import PATH, names, read_events
from trioserve.frontend.channel import OutputChannel
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app
from trioserve.server.responses.background import open_background
from trioserve.server.responses.home import ResponsesHome
from trioserve.server.responses.memory_store import MemoryStore
from trioserve.server.responses.store import StoreLimits

if TYPE_CHECKING:
    from fake_engine import FakeEngine
    from trioserve.outputs import RequestOutput

LIMITS = StoreLimits(max_responses=10, max_bytes=2**20, ttl=3600)


@pytest.mark.parametrize("background", [False, True])
async def test_no_task_is_woken_for_an_output_and_the_whole_is_kept(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    num_taken = 0
    take = OutputChannel.take

    async def counted_take(channel: OutputChannel) -> RequestOutput:
        nonlocal num_taken
        num_taken += 1
        return await take(channel)

    monkeypatch.setattr(OutputChannel, "take", counted_take)
    store = MemoryStore(LIMITS)
    asked: dict[str, Any] = {"input": "Hi", "stream": True, "background": background}
    async with open_background(1) as nursery:
        app = create_app(fake.llm, responses=ResponsesHome(store, nursery))
        async with serving(app) as server:
            client = await server.connect()
            await client.send(http_request(PATH, asked, "connection: close"))
            await until(lambda: fake.client.added)
            (add,) = fake.client.added
            await wait_all_tasks_blocked(0.001)
            for text in ("a", "b\n", '"', "é", "\\"):
                fake.client.emit(add, text)
                await wait_all_tasks_blocked(0.001)
            fake.client.emit(add, "z", FinishReason.LENGTH)
            events = read_events((await client.read_reply()).body)
    assert num_taken == 2  # the first and the last
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event.data["delta"] for event in events if event.name.endswith("text.delta")]
    assert deltas == ["a", "b\n", '"', "é", "\\", "z"]
    assert names(events)[-1] == "incomplete"
    final = events[-1].data["response"]
    assert final["output"][0]["content"][0]["text"] == "".join(deltas)
    ((stored, _),) = store._kept.values()
    assert json.loads(stored.response) == final
