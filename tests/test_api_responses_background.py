"""Responses in the background: their lives, their streams, and what ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_api import Answer
from helpers_responses import PATH, Api, PacedLLM, names, read_events, serving
from trioserve.errors import EngineDeadError, EngineGenerateError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NUM_OUTPUTS = 3  # of the fake's usual answer
STAGES = [0, 1, 2]
EACH_STAGE = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serving(PacedLLM()) as served:
        yield served
        assert not served.llm.running
        assert served.background.num_running == 0


def pace(api: Api) -> PacedLLM:
    assert isinstance(api.llm, PacedLLM)
    return api.llm


async def begin(api: Api, outputs: int = 0, **request: Any) -> str:
    """A response that has had so many outputs; its id."""
    reply = await api.create(background=True, **request)
    assert reply.status == 200, reply.body
    assert (reply.json["status"], reply.json["output"]) == ("queued", [])
    pace(api).let(outputs)
    await wait_all_tasks_blocked()
    response_id: str = reply.json["id"]
    return response_id


async def test_a_life(api: Api) -> None:
    response_id = await begin(api)
    assert (await api.get(response_id)).json["status"] == "queued"
    pace(api).let(2)
    await wait_all_tasks_blocked()
    response = (await api.get(response_id)).json
    assert (response["status"], response["background"]) == ("in_progress", True)
    assert response["output"][0]["content"][0]["text"] == "Hello,"
    pace(api).let(1)
    await wait_all_tasks_blocked()
    assert api.background.num_running == 0
    response = (await api.get(response_id)).json
    assert (response["status"], response["usage"]["output_tokens"]) == ("completed", 3)
    assert response["output"][0]["content"][0]["text"] == "Hello, world"
    assert (await api.items(response_id)).json["data"][0]["content"][0]["text"] == "Hi there"


@EACH_STAGE
async def test_cancel(api: Api, stage: int) -> None:
    response_id = await begin(api, stage)
    assert len(api.llm.running) == 1
    response = (await api.cancel(response_id)).json
    assert not api.llm.running
    assert (response["status"], response["error"]) == ("cancelled", None)
    assert [item["status"] for item in response["output"]] == ["incomplete"] * bool(stage)
    assert (await api.get(response_id)).json == response
    assert (await api.cancel(response_id)).json == response


async def test_to_cancel_what_has_ended_changes_nothing(api: Api) -> None:
    response_id = await begin(api, NUM_OUTPUTS)
    response = (await api.cancel(response_id)).json
    assert response["status"] == "completed"


@EACH_STAGE
async def test_delete(api: Api, stage: int) -> None:
    response_id = await begin(api, stage)
    assert (await api.delete(response_id)).json["deleted"] is True
    assert not api.llm.running
    assert (await api.get(response_id)).status == 404
    assert (await api.delete(response_id)).status == 404


async def test_one_that_is_being_made_cannot_be_gone_on_from(api: Api) -> None:
    response_id = await begin(api, 1)
    reply = await api.create(previous_response_id=response_id)
    assert (reply.status, reply.error["code"]) == (400, "previous_response_in_progress")
    pace(api).let(2 + NUM_OUTPUTS)
    await wait_all_tasks_blocked()
    assert (await api.create(previous_response_id=response_id)).status == 200


async def test_its_deadline_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(PacedLLM(), request_timeout=10) as api:
        response_id = await begin(api, 1)
        await trio.sleep(9)
        assert (await api.get(response_id)).json["status"] == "in_progress"
        await trio.sleep(2)
        response = (await api.get(response_id)).json
        assert response["status"] == "failed"
        assert "deadline" in response["error"]["message"]
        assert not api.llm.running


@pytest.mark.parametrize("error", [EngineGenerateError("secret"), EngineDeadError("secret")])
async def test_a_failure(error: Exception) -> None:
    async with serving(PacedLLM(Answer(error=error))) as api:
        response_id = await begin(api, 9)
        response = (await api.get(response_id)).json
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert "secret" not in str(response)
        events = read_events((await api.get(response_id, "stream=true")).body)
        assert events[-1].data["response"] == response


async def test_a_wrong_request_is_told_at_once(api: Api) -> None:
    reply = await api.create(background=True, input=" ".join(["word"] * 100))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert api.background.num_running == 0


# Streams


async def test_its_stream(api: Api) -> None:
    async with trio.open_nursery() as nursery:
        exchange = api.exchange("POST", PATH, {"input": "Hi", "background": True, "stream": True})
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        assert names(read_events(exchange.received)) == ["created", "queued"]
        pace(api).let(NUM_OUTPUTS)
    events = read_events(exchange.reply.body)
    assert names(events)[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert names(events)[-1] == "completed"
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1].data["response"]
    assert (await api.get(final["id"])).json == final


async def test_who_leaves_its_stream_does_not_end_it(api: Api) -> None:
    async with trio.open_nursery() as nursery:
        exchange = api.exchange("POST", PATH, {"input": "Hi", "background": True, "stream": True})
        nursery.start_soon(exchange.run)
        pace(api).let(1)
        await wait_all_tasks_blocked()
        exchange.leave()
    seen = read_events(exchange.received)
    response_id, last = seen[0].data["response"]["id"], seen[-1].data["sequence_number"]
    assert api.background.num_running == 1
    async with trio.open_nursery() as nursery:
        query = f"stream=true&starting_after={last}".encode().decode()
        resumed = api.exchange("GET", f"{PATH}/{response_id}", query=query)
        nursery.start_soon(resumed.run)
        await wait_all_tasks_blocked()
        pace(api).let(2)
    events = seen + read_events(resumed.reply.body)
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert names(events)[-1] == "completed"


@pytest.mark.parametrize("ending", ["completed", "cancelled"])
async def test_every_replay_is_what_was_streamed(api: Api, ending: str) -> None:
    async with trio.open_nursery() as nursery:
        exchange = api.exchange("POST", PATH, {"input": "Hi", "background": True, "stream": True})
        nursery.start_soon(exchange.run)
        pace(api).let(2)
        await wait_all_tasks_blocked()
        response_id = read_events(exchange.received)[0].data["response"]["id"]
        if ending == "completed":
            pace(api).let(1)
        else:
            assert (await api.cancel(response_id)).json["status"] == ending
    body = exchange.reply.body
    frames = [frame + b"\n\n" for frame in body.split(b"\n\n") if frame]
    assert (await api.get(response_id, "stream=true")).body == body
    for number in range(len(frames)):
        replay = await api.get(response_id, f"stream=true&starting_after={number}")
        assert replay.body == b"".join(frames[number + 1 :])
    for wrong in (len(frames), 10**8):
        reply = await api.get(response_id, f"stream=true&starting_after={wrong}")
        assert (reply.status, reply.error["param"]) == (400, "starting_after")


async def test_several_read_along(api: Api) -> None:
    response_id = await begin(api)
    exchanges = [api.exchange("GET", f"{PATH}/{response_id}", query="stream=true") for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for exchange in exchanges:
            nursery.start_soon(exchange.run)
            pace(api).let(1)
            await wait_all_tasks_blocked()
    assert len({exchange.reply.body for exchange in exchanges}) == 1


async def test_a_deleted_one_ends_its_streams(api: Api) -> None:
    response_id = await begin(api, 1)
    async with trio.open_nursery() as nursery:
        exchange = api.exchange("GET", f"{PATH}/{response_id}", query="stream=true")
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        await api.delete(response_id)
    last = read_events(exchange.reply.body)[-1]
    assert (last.name, last.data["code"]) == ("error", "response_cancelled")


async def test_another_key_cannot_end_or_read_it() -> None:
    async with serving(PacedLLM(), api_key=("mine", "other")) as api:
        response_id = (await api.create(key="mine", background=True)).json["id"]
        for call in (api.get, api.cancel, api.delete, api.items):
            assert (await call(response_id, key="other")).status == 404
        assert (await api.get(response_id, "stream=true", key="other")).status == 404
        assert api.background.num_running == 1
        assert (await api.delete(response_id, key="mine")).status == 200


# Bounds


async def test_so_many_at_a_time() -> None:
    async with serving(PacedLLM(), responses_max_background=2) as api:
        first = await begin(api)
        second = await begin(api)
        reply = await api.create(background=True)
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        await api.cancel(first)
        third = await begin(api)
        for response_id in (second, third):
            await api.cancel(response_id)


async def test_it_holds_its_place_at_the_door_until_its_end() -> None:
    llm = PacedLLM()
    async with serving(llm, max_concurrent_requests=1) as api:
        response_id = await begin(api, 1)
        assert (await api.create()).status == 503
        assert (await api.create(background=True)).status == 503
        await api.cancel(response_id)
        llm.let(NUM_OUTPUTS)
        assert (await api.create()).status == 200


# The end of the server


async def test_at_the_end_what_runs_is_waited_for() -> None:
    llm = PacedLLM()
    async with serving(llm) as api:
        response_id = await begin(api, 1)
        llm.let(2)
    assert api.store is not None
    assert b'"completed"' in (await stored(api, response_id))


async def test_what_does_not_end_in_time_has_failed(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(PacedLLM()) as api:
        response_id = await begin(api, 1)
        late = await begin(api)
        api.app.end_requests(trio.current_time() + 5)
    for each in (response_id, late):
        text = await stored(api, each)
        assert b'"failed"' in text
        assert b"shutting down" in text


async def test_what_is_cancelled_with_the_server_is_stored_as_that() -> None:
    with trio.CancelScope() as scope:
        async with serving(PacedLLM()) as api:
            response_id = await begin(api, 1)
            scope.cancel()
    assert b'"cancelled"' in (await stored(api, response_id))


async def stored(api: Api, response_id: str) -> bytes:
    assert api.store is not None
    found = await api.store.get("address:127.0.0.1", response_id)
    assert found is not None
    return found.response
