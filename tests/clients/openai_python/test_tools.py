"""Tools in chat completions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pydantic
import pytest
from weather import WEATHER, WEATHER_QUESTION, WEATHER_REPORT

if TYPE_CHECKING:
    from endpoint import Endpoint

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER},
}
STRICT: dict[str, Any] = {"type": "function", "function": TOOL["function"] | {"strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class GetWeather(pydantic.BaseModel):
    """The weather of a city"""

    city: str


def ask(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": WEATHER_QUESTION}],
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 64,
    } | more


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED, None], ids=str)
def test_a_call(caller: openai.OpenAI, tools: Endpoint, choice: Any) -> None:
    more = {} if choice is None else {"tool_choice": choice}
    (answer,) = caller.chat.completions.create(**ask(tools, parallel_tool_calls=False, **more)).choices
    assert calls_of(answer.message) == [("get_weather", {"city": "Paris"})]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls[0].id
    assert not answer.message.content


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=str)
def test_the_helper_for_streams(caller: openai.OpenAI, tools: Endpoint, choice: Any) -> None:
    fields = ask(tools, tools=[STRICT], tool_choice=choice, parallel_tool_calls=False)
    whole = caller.chat.completions.create(**fields).choices[0]
    with caller.chat.completions.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert calls_of(final.message) == calls_of(whole.message) == [("get_weather", {"city": "Paris"})]
    assert final.finish_reason == "tool_calls"
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert (
        "".join(event.arguments_delta for event in deltas) == whole.message.tool_calls[0].function.arguments
    )
    (done,) = (event for event in events if event.type == "tool_calls.function.arguments.done")
    assert done.name == "get_weather"
    assert done.parsed_arguments == {"city": "Paris"}


def test_arguments_are_parsed(caller: openai.OpenAI, tools: Endpoint) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    answer = caller.chat.completions.parse(**ask(tools, tools=[tool], tool_choice="required"))
    first = answer.choices[0].message.tool_calls[0]
    assert first.function.parsed_arguments == GetWeather(city="Paris")


def test_the_older_names_of_the_helpers(caller: openai.OpenAI, tools: Endpoint) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    with caller.beta.chat.completions.stream(**ask(tools, tools=[tool], tool_choice="required")) as stream:
        final = stream.until_done().get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")


def test_a_result_is_answered(caller: openai.OpenAI, tools: Endpoint) -> None:
    first = caller.chat.completions.create(**ask(tools, tool_choice="required", parallel_tool_calls=False))
    message = first.choices[0].message
    conversation = [
        {"role": "user", "content": WEATHER_QUESTION},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": WEATHER_REPORT},
    ]
    fields = ask(tools, messages=conversation)
    del fields["tools"]
    answer = caller.chat.completions.create(**fields).choices[0]
    assert answer.finish_reason == "stop"
    assert "17" in answer.message.content


def test_no_call_when_none_is_wanted(caller: openai.OpenAI, tools: Endpoint) -> None:
    answer = caller.chat.completions.create(**ask(tools, tool_choice="none", max_tokens=16)).choices[0]
    assert not answer.message.tool_calls
    assert answer.message.content


def test_functions_in_the_deprecated_form(caller: openai.OpenAI, tools: Endpoint) -> None:
    fields = ask(tools, functions=[TOOL["function"]], function_call={"name": "get_weather"})
    del fields["tools"]
    answer = caller.chat.completions.create(**fields).choices[0]
    assert json.loads(answer.message.function_call.arguments) == {"city": "Paris"}
    assert answer.message.function_call.name == "get_weather"
