"""Anthropic's client for Python, on /v1/messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from weather import WEATHER, WEATHER_QUESTION, WEATHER_REPORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endpoint import Endpoint

TOOL: Any = {"name": "get_weather", "description": "The weather of a city", "input_schema": WEATHER}


def _client(endpoint: Endpoint) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)


@pytest.fixture
def talker(text: Endpoint) -> Iterator[anthropic.Anthropic]:
    with _client(text) as client:
        yield client


@pytest.fixture
def caller(tools: Endpoint) -> Iterator[anthropic.Anthropic]:
    with _client(tools) as client:
        yield client


def ask(endpoint: Endpoint, content: str = "What is the capital of Japan?", **more: Any) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 24,
        "extra_body": {"temperature": 0},  # a field of the API that the client no longer has
    } | more


def test_create(talker: anthropic.Anthropic, text: Endpoint) -> None:
    message = talker.messages.create(**ask(text, system="Be brief."))
    (block,) = message.content
    assert (message.type, message.role, block.type) == ("message", "assistant", "text")
    assert "Tokyo" in block.text
    assert message.stop_reason in {"end_turn", "max_tokens"}
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 10
    assert message.usage.output_tokens > 0


def test_a_stream_says_the_same(talker: anthropic.Anthropic, text: Endpoint) -> None:
    whole = talker.messages.create(**ask(text))
    with talker.messages.stream(**ask(text)) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_events_of_a_stream(talker: anthropic.Anthropic, text: Endpoint) -> None:
    events = [event.type for event in talker.messages.create(**ask(text, stream=True))]
    assert [event for event in events if event not in {"ping", "content_block_delta"}] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_a_stop_sequence(talker: anthropic.Anthropic, text: Endpoint) -> None:
    message = talker.messages.create(**ask(text, stop_sequences=["Tokyo"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Tokyo")
    assert "Tokyo" not in message.content[0].text


def test_blocks_and_a_conversation(talker: anthropic.Anthropic, text: Endpoint) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of Japan?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Tokyo."}]},
        {"role": "user", "content": "And what is the name of its river?"},
    ]
    message = talker.messages.create(
        **ask(text, system=[{"type": "text", "text": "Be brief."}], messages=messages)
    )
    assert message.content[0].text


def test_tokens_are_counted(talker: anthropic.Anthropic, text: Endpoint) -> None:
    request = ask(text)
    counted = talker.messages.count_tokens(model=request["model"], messages=request["messages"])
    usage = talker.messages.create(**request).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    "choice",
    [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}],
    ids=lambda choice: choice["type"],
)
def test_a_tool_and_its_result(caller: anthropic.Anthropic, tools: Endpoint, choice: Any) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    request = ask(tools, WEATHER_QUESTION, max_tokens=64)
    message = caller.messages.create(**request, tools=[TOOL], tool_choice=choice)
    (use,) = message.content
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER_REPORT}
    conversation = [
        *request["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = caller.messages.create(**request | {"messages": conversation})
    assert "17" in answer.content[0].text
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", ["auto", "any"])
def test_a_tool_in_a_stream(caller: anthropic.Anthropic, tools: Endpoint, choice: str) -> None:
    request = ask(tools, WEATHER_QUESTION, tools=[TOOL], max_tokens=64)
    chosen: Any = {"type": choice, "disable_parallel_tool_use": True}
    with caller.messages.stream(**request, tool_choice=chosen) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (use,) = final.content
    assert use.input == {"city": "Paris"}
    assert "".join(deltas)
    assert final.stop_reason == "tool_use"


def test_errors(talker: anthropic.Anthropic, text: Endpoint) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        talker.messages.create(**ask(text, extra_body={"temperature": -1}))
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in caught.value.message
    with pytest.raises(anthropic.NotFoundError):
        talker.messages.create(**ask(text) | {"model": "none"})


def test_a_wrong_key(text: Endpoint) -> None:
    with (
        anthropic.Anthropic(base_url=text.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        client.messages.create(**ask(text))
    assert caught.value.body["error"]["type"] == "authentication_error"


async def test_the_asynchronous_client_and_leaving(text: Endpoint) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=text.url, api_key=text.key, max_retries=0) as client,
        client.messages.stream(**ask(text, "Count to 1000.", max_tokens=1000)) as stream,
    ):
        assert await anext(stream.text_stream)
    text.wait_until_idle()
