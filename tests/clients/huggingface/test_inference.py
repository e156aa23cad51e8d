"""huggingface_hub's InferenceClient."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from weather import PERSON, PERSON_QUESTION, WEATHER, WEATHER_QUESTION

if TYPE_CHECKING:
    from endpoint import Endpoint

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER},
}


def ask(endpoint: Endpoint, content: str, **more: Any) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 64,
    } | more


@pytest.fixture
def client(tools: Endpoint) -> InferenceClient:
    return InferenceClient(base_url=tools.api, api_key=tools.key)


def test_chat_whole_and_streamed(client: InferenceClient, tools: Endpoint) -> None:
    request = ask(tools, "What is the capital of France?")
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat_completion(**request, stream=True))
    assert "Paris" in whole.choices[0].message.content
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    assert whole.usage.completion_tokens > 0


def test_a_schema(client: InferenceClient, tools: Endpoint) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat_completion(**ask(tools, PERSON_QUESTION, response_format=form))
    assert json.loads(answer.choices[0].message.content) == {"name": "Bob", "age": 42}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool(client: InferenceClient, tools: Endpoint, choice: str) -> None:
    request = ask(tools, WEATHER_QUESTION, tools=[TOOL], tool_choice=choice)
    first = client.chat_completion(**request).choices[0].message.tool_calls[0]
    assert (first.function.name, json.loads(first.function.arguments)) == ("get_weather", {"city": "Paris"})
    calls = [
        call
        for chunk in client.chat_completion(**request, stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
        if call.index == 0
    ]
    assert "".join(call.function.arguments for call in calls) == first.function.arguments


def test_errors(client: InferenceClient, tools: Endpoint) -> None:
    with pytest.raises(HfHubHTTPError) as caught:
        client.chat_completion(**ask(tools, "Hello", top_p=7.0))
    assert caught.value.response.status_code == 400
    assert "top_p" in str(caught.value)


async def test_the_asynchronous_client(tools: Endpoint) -> None:
    async with AsyncInferenceClient(base_url=tools.api, api_key=tools.key) as client:
        stream = await client.chat_completion(**ask(tools, "What is the capital of France?", stream=True))
        content = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Paris" in content
