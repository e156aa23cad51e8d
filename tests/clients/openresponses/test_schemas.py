"""Responses and all their events, by the models of the Open Responses specification."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import openresponses_types
import pytest
from openresponses_types import ResponseResource
from weather import PERSON, PERSON_QUESTION, WEATHER, WEATHER_QUESTION

if TYPE_CHECKING:
    from endpoint import Endpoint
    from pydantic import BaseModel

TOOL = {
    "type": "function", "name": "get_weather", "description": "The weather of a city",
    "parameters": WEATHER, "strict": True,
}  # fmt: skip

REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"input": "What is the capital of Japan?", "instructions": "Be brief.", "metadata": {"a": "b"}},
    "cut off": {"input": "What is the capital of Japan?", "max_output_tokens": 2},
    "messages": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
            {"type": "message", "role": "user", "content": "And now?"},
        ],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    "a schema": {
        "input": PERSON_QUESTION,
        "text": {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}},
    },
    "a call": {"input": WEATHER_QUESTION, "tools": [TOOL], "tool_choice": "required"},
    "a call if it likes": {"input": WEATHER_QUESTION, "tools": [TOOL]},
    "no call": {"input": WEATHER_QUESTION, "tools": [TOOL], "tool_choice": "none"},
}
EACH = pytest.mark.parametrize("name", REQUESTS)


def _models() -> dict[str, type[BaseModel]]:
    """Of the events, by their type."""
    models = {}
    for name, model in vars(openresponses_types).items():
        if name.endswith("StreamingEvent"):
            (event,) = model.model_fields["type"].annotation
            models[event.value] = model
    return models


EVENTS = _models()


def post(endpoint: Endpoint, name: str, **more: Any) -> httpx.Response:
    request = {"model": endpoint.model, "temperature": 0, "max_output_tokens": 48} | REQUESTS[name] | more
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    answer = httpx.post(f"{endpoint.api}/responses", json=request, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def take_schema(response: Any, name: str) -> None:
    """The models want the schema of an answer's form to be null. That it is the request's is checked here."""
    if response is not None and "text" in REQUESTS[name]:
        asked = REQUESTS[name]["text"]["format"]
        given = response["text"].pop("format")
        assert {key: given[key] for key in asked} == asked
        response["text"]["format"] = {"type": "text"}


@EACH
def test_a_response(tools: Endpoint, name: str) -> None:
    answer = post(tools, name).json()
    take_schema(answer, name)
    response = ResponseResource.model_validate(answer)
    assert response.status == ("incomplete" if name == "cut off" else "completed")


@EACH
def test_the_events_of_a_stream(tools: Endpoint, name: str) -> None:
    answer = post(tools, name, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [frame.split("\n") for frame in answer.text.split("\n\n") if frame and not frame.startswith(":")]
    for head, data in events:
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        take_schema(event.get("response"), name)
        EVENTS[event["type"]].model_validate(event)
    assert len(events) > 5
