"""pydantic-ai on chat completions and on responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import PERSON_QUESTION, WEATHER_QUESTION, WEATHER_REPORT

if TYPE_CHECKING:
    from endpoint import Endpoint
    from pydantic_ai.models import Model
    from pydantic_ai.tools import ToolDefinition

SETTINGS = ModelSettings(temperature=0.0, max_tokens=64)


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, tools: Endpoint) -> Model:
    return request.param(tools.model, provider=OpenAIProvider(base_url=tools.api, api_key=tools.key))


async def test_text(model: Model) -> None:
    result = await Agent(model, model_settings=SETTINGS).run("What is the capital of France?")
    assert "Paris" in result.output
    assert result.usage.output_tokens > 0


async def test_a_stream(model: Model) -> None:
    agent = Agent(model, model_settings=SETTINGS, instructions="Be brief.")
    async with agent.run_stream("What is the capital of France?") as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 1


@pytest.mark.parametrize("form", [NativeOutput, ToolOutput])
async def test_an_object(model: Model, form: type[NativeOutput[Person] | ToolOutput[Person]]) -> None:
    agent = Agent(model, output_type=form(Person), model_settings=SETTINGS)
    result = await agent.run(PERSON_QUESTION)
    assert result.output == Person(name="Bob", age=42)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_a_tool(model: Model, *, is_streamed: bool) -> None:
    agent = Agent(model, model_settings=SETTINGS)
    asked: list[str] = []

    async def once(_context: object, tool: ToolDefinition) -> ToolDefinition | None:
        return None if asked else tool

    @agent.tool_plain(prepare=once)
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return WEATHER_REPORT

    if is_streamed:
        async with agent.run_stream(WEATHER_QUESTION) as result:
            output = await result.get_output()
    else:
        output = (await agent.run(WEATHER_QUESTION)).output
    assert asked == ["Paris"]
    assert "17" in output
