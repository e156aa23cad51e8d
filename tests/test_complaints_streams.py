"""Complaints 17, 18, 25 and 26: how streams end, and what comes with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_api import Exchange
from helpers_complaints import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    QUESTION,
    ask_together,
    choices_of,
    http_request,
    parse_events,
    until,
)
from helpers_http import serving
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app

if TYPE_CHECKING:
    from trio.testing import MockClock

    from fake_engine import FakeEngine
    from served import ServedModel

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": QUESTION}),
    "chat, n=2": (CHAT, {"messages": QUESTION, "n": 2, "temperature": 1, "seed": 3}),
    "completion": (COMPLETIONS, {"prompt": "Once upon a time"}),
    "two prompts, n=2": (COMPLETIONS, {"prompt": ["Once upon", "a time"], "n": 2, "temperature": 1}),
}
SHORT = {"max_tokens": 6}
SHAPES = pytest.mark.parametrize(("path", "fields"), ASKED.values(), ids=ASKED)
ENDS: list[dict[str, Any]] = [{"max_tokens": 3}, {"stop": [" ", "a", "e"]}, {"max_tokens": 12}]
"""By length, a stop string, and where the model ends."""


def num_choices(fields: dict[str, Any]) -> int:
    prompts = fields.get("prompt")
    return int(fields.get("n", 1)) * (len(prompts) if isinstance(prompts, list) else 1)


# Complaint 17: an error inside a stream has OpenAI's shape, and then the stream ends; the SDK raises APIError


def ask_with_sdk(port: int, received: list[str]) -> openai.APIError:
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(model="fake", prompt="Hi", stream=True) as stream,
        pytest.raises(openai.APIError) as raised,
    ):
        received.extend(chunk.choices[0].text for chunk in stream)
    return raised.value


async def test_complaint_17_the_sdk_raises_for_an_error_inside_a_stream(fake: FakeEngine) -> None:
    received: list[str] = []

    async def die_after_two_tokens() -> None:
        await until(lambda: fake.client.added)
        fake.client.emit(fake.client.added[0], "a")
        while "a" not in received:  # noqa: ASYNC110 - it comes from a thread
            await trio.sleep(0.001)
        fake.client.die()

    async with serving(create_app(fake.llm)) as server, trio.open_nursery() as nursery:
        nursery.start_soon(die_after_two_tokens)
        with trio.fail_after(20):
            error = await trio.to_thread.run_sync(ask_with_sdk, server.address[1], received)
    assert received == ["a"]
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code"}
    assert (error.type, error.code) == ("server_error", "engine_dead")


async def test_complaint_17_the_error_is_an_event_and_then_the_stream_ends(fake: FakeEngine) -> None:
    async with serving(create_app(fake.llm)) as server:
        client = await server.connect()
        await client.send(http_request(COMPLETIONS, {"prompt": "Hi", "stream": True}))
        await until(lambda: fake.client.added)
        fake.client.emit(fake.client.added[0], "a")
        assert (await client.read_head())[0] == 200
        await client.read_chunk()
        fake.client.die()
        rest = b""
        while chunk := await client.read_chunk():
            rest += chunk
    event, done = parse_events(rest.decode())
    assert set(event) == {"error"}
    assert set(event["error"]) == {"message", "type", "param", "code"}
    assert done == "[DONE]"


# Complaint 18: every stream ends in [DONE] or an error event


@SHAPES
def test_complaint_18_every_stream_ends_in_done(
    server: ServedModel, path: str, fields: dict[str, Any]
) -> None:
    for events in ask_together(server, *((path, {**fields, **end, "stream": True}) for end in ENDS)):
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        assert not any("error" in event for event in events[:-1])
        for index in range(num_choices(fields)):
            reasons = [choice["finish_reason"] for choice in choices_of(events, index)]
            assert reasons[:-1] == [None] * (len(reasons) - 1), index
            assert reasons[-1] in {"stop", "length"}, index


async def test_complaint_18_a_stream_out_of_time_ends_in_an_error_event(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    body = json.dumps({"prompt": "Hi", "stream": True, "timeout": 5}).encode()
    exchange = Exchange(create_app(fake.llm), "POST", COMPLETIONS, body, {"content-type": "application/json"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.sleep(1)
        fake.client.emit(fake.client.added[0], "a")
    *chunks, error, done = exchange.reply.events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a"]
    assert (error["error"]["code"], done) == ("deadline_exceeded", "[DONE]")
    assert fake.client.aborted == [fake.client.added[0].request_id]


# Complaint 25: logprobs in a stream are given or refused, never dropped silently

LOGPROBS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"logprobs": True}),
    (CHAT, {"logprobs": True, "top_logprobs": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "stop": ["Tokyo"]}),
    (CHAT, {"logprobs": True, "response_format": {"type": "json_object"}}),
    (CHAT, {"top_logprobs": 2}),
    (CHAT, {"logprobs": True, "top_logprobs": 1000}),
    (CHAT, {"logprobs": True, "use_beam_search": True}),
    (COMPLETIONS, {"logprobs": 0}),
    (COMPLETIONS, {"logprobs": 2, "n": 2, "temperature": 1}),
    (COMPLETIONS, {"logprobs": 2, "stop": [" "]}),
    (COMPLETIONS, {"logprobs": 2, "use_beam_search": True}),
    (COMPLETIONS, {"logprobs": 1000}),
]


@pytest.mark.parametrize(("path", "fields"), LOGPROBS)
def test_complaint_25_logprobs_of_a_stream_are_given_or_refused(
    server: ServedModel, path: str, fields: dict[str, Any]
) -> None:
    body = {**GREEDY, "messages": QUESTION, "prompt": "Hello", "return_token_ids": True, **SHORT, **fields}
    del body["prompt" if path == CHAT else "messages"]
    status, answer = server.request("POST", path, {**body, "stream": True})
    if status == 400:
        assert answer["error"]["param"] in {*fields, "stream"}
        return
    events = parse_events(answer)
    for index in range(fields.get("n", 1)):
        choices = choices_of(events, index)
        num_tokens = sum(len(choice.get("token_ids") or ()) for choice in choices)
        assert num_tokens > 0
        logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        assert sum(len(given["content" if path == CHAT else "tokens"]) for given in logprobs) == num_tokens


# Complaint 26: exactly one usage chunk, before [DONE], when asked; `usage` null elsewhere


@SHAPES
def test_complaint_26_one_usage_chunk_when_asked(
    server: ServedModel, path: str, fields: dict[str, Any]
) -> None:
    short = {**fields, **SHORT, "return_token_ids": True}
    streamed = {**short, "stream": True}
    asked = {**streamed, "stream_options": {"include_usage": True}}
    whole, with_usage, without = ask_together(server, (path, short), (path, asked), (path, streamed))
    *chunks, usage, done = with_usage
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert usage["choices"] == []
    num_tokens = sum(len(chunk["choices"][0].get("token_ids") or ()) for chunk in chunks)
    assert usage["usage"]["completion_tokens"] == num_tokens > 0
    assert usage["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + num_tokens
    assert not any(event.get("usage") for event in without[:-1])


async def test_complaint_26_a_stream_that_fails_has_no_usage(fake: FakeEngine) -> None:
    body = {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}}
    async with serving(create_app(fake.llm)) as server:
        client = await server.connect()
        await client.send(http_request(COMPLETIONS, body))
        await until(lambda: fake.client.added)
        fake.client.emit(fake.client.added[0], "a")
        await wait_all_tasks_blocked(0.01)
        fake.client.emit(fake.client.added[0], "b", FinishReason.ERROR)
        reply = await client.read_reply()
    assert b'"error"' in reply.body
    assert b'"completion_tokens"' not in reply.body
