"""/invocations, which does what the body means, and /load."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
import trio.testing

from helpers_api import Answer, Client, FakeLLM
from trioserve.errors import OverloadedError
from trioserve.server_args import ServerArgs

PATH = "/invocations"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_messages_are_a_chat_and_a_prompt_is_a_completion() -> None:
    client = Client(FakeLLM())
    assert (await client.post(PATH, CHAT)).json["object"] == "chat.completion"
    assert (await client.post(PATH, {"prompt": "Hi"})).json["object"] == "text_completion"


async def test_streams_too() -> None:
    events = (await Client(FakeLLM()).post(PATH, {**CHAT, "stream": True})).events
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[-1] == "[DONE]"


async def test_a_large_body_is_read_whole() -> None:
    llm = FakeLLM()
    await Client(llm).post(PATH, {"padding": "x" * 400_000, "prompt": "Hi"})
    assert llm.calls[0].text == "Hi"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"text": "x"}', "The body must have one of messages, prompt"),
        (b'{"input": "x"}', "input is not served here: responses are made by POST /v1/responses"),
        (b"[]", "is not a JSON object"),
        (b'{"prompt": ', "is not a JSON object"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (json.dumps({"prompt": "Hi", "n": 0}).encode(), "n must be an integer from 1"),
    ],
)
async def test_what_is_wrong_is_said(body: bytes, words: str) -> None:
    reply = await Client(FakeLLM()).post(PATH, body)
    assert reply.status == 400
    assert words in reply.error["message"]


async def test_it_is_behind_the_door_and_counts_once() -> None:
    llm = FakeLLM()
    client = Client(llm, ServerArgs(max_requests_per_minute_per_key=1))
    assert (await client.post(PATH, CHAT)).status == 200
    assert (await client.post(PATH, CHAT)).status == 429
    llm.no_room = OverloadedError("Too many wait.")
    assert (await Client(llm).post(PATH, CHAT)).status == 503


async def test_the_content_type_must_be_json() -> None:
    reply = await Client(FakeLLM()).call("POST", PATH, b"{}", {"content-type": "text/plain"})
    assert reply.error["code"] == "unsupported_content_type"


async def test_the_load_is_what_is_under_way() -> None:
    llm = FakeLLM(Answer())
    llm.outputs_left = 0
    client = Client(llm)

    async def load() -> int:
        number: int = (await client.get("/load")).json["server_load"]
        return number

    assert await load() == 0
    async with trio.open_nursery() as nursery:
        for path in ("/v1/chat/completions", PATH):
            nursery.start_soon(client.post, path, CHAT)
        await trio.testing.wait_all_tasks_blocked()
        assert await load() == 2
        nursery.cancel_scope.cancel()
    assert await load() == 0
