"""OpenAI's agents library, on chat completions and on responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel
from weather import PERSON_QUESTION, WEATHER_QUESTION, WEATHER_REPORT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agents import Model
    from endpoint import Endpoint

SETTINGS = ModelSettings(temperature=0.0, max_tokens=64, parallel_tool_calls=False)

set_tracing_disabled(True)  # else it is sent to OpenAI


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
async def model(request: pytest.FixtureRequest, tools: Endpoint) -> AsyncIterator[Model]:
    async with openai.AsyncOpenAI(base_url=tools.api, api_key=tools.key, max_retries=0) as client:
        yield request.param(model=tools.model, openai_client=client)


async def test_text(model: Model) -> None:
    agent = Agent(name="Guide", instructions="Be brief.", model=model, model_settings=SETTINGS)
    result = await Runner.run(agent, "What is the capital of France?")
    assert "Paris" in result.final_output


async def test_a_stream(model: Model) -> None:
    agent = Agent(name="Guide", instructions="Be brief.", model=model, model_settings=SETTINGS)
    result = Runner.run_streamed(agent, "What is the capital of France?")
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert "Paris" in result.final_output
    assert kinds.count("response.output_text.delta") > 1
    assert kinds[-1] == "response.completed"


async def test_an_object(model: Model) -> None:
    agent = Agent(name="Clerk", model=model, model_settings=SETTINGS, output_type=Person)
    assert (await Runner.run(agent, PERSON_QUESTION)).final_output == Person(name="Bob", age=42)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_a_tool(model: Model, *, is_streamed: bool) -> None:
    asked: list[str] = []

    @function_tool(is_enabled=lambda _context, _agent: not asked)
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return WEATHER_REPORT

    agent = Agent(name="Guide", model=model, model_settings=SETTINGS, tools=[get_weather])
    if is_streamed:
        result = Runner.run_streamed(agent, WEATHER_QUESTION)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, WEATHER_QUESTION)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert asked == ["Paris"]
    assert "17" in result.final_output
