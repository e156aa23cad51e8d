"""For tests of /v1/messages: requests, and what a client makes of a stream."""

from __future__ import annotations

import json
from typing import Any

from helpers_api import Client, FakeLLM, Reply

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


def request(content: Any = "Hi there", **more: Any) -> dict[str, Any]:
    return {"model": "small", "max_tokens": 10, "messages": [{"role": "user", "content": content}]} | more


async def ask(llm: FakeLLM, content: Any = "Hi there", **more: Any) -> Reply:
    return await Client(llm).post(PATH, request(content, **more))


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """Name and data of each event; comments are passed over."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == event["type"] for name, event in events)
    return events


def accumulate(body: bytes) -> dict[str, Any]:
    """The message that a stream told; every rule of the order of its events is looked at."""
    events = [event for name, event in events_of(body) if name != "ping"]
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    pieces: list[str] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open, pieces = True, []
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                _add(message["content"][-1], event["delta"], pieces)
            case "content_block_stop":
                assert is_open
                is_open = False
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": message["usage"] | events[-2]["usage"]}


def _add(block: dict[str, Any], delta: dict[str, Any], pieces: list[str]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            assert block["signature"] == ""
            block["signature"] = delta["signature"]
        case "input_json_delta":
            pieces.append(delta["partial_json"])
            try:
                block["input"] = json.loads("".join(pieces))
            except ValueError:
                block["input"] = {}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}
