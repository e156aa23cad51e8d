"""A real model that calls of its own accord, through the real server, as the real client reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from served import STEADY, ServedModel, served

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "qwen2.5-coder-0.5b"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
REQUEST: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
        }
    ],
    "temperature": 0,
    "max_tokens": 40,
}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    # Its template has no marks of thinking: these are made up, and words that it would never say.
    flags = [MODEL, "--dtype", STEADY, "--max-model-len", "1024"]
    marks = ["--reasoning-config.start", "[[[", "--reasoning-config.end", "]]]"]
    with served(tmp_path_factory.mktemp("coder"), [*flags, *marks]) as running:
        yield running


@pytest.fixture
def client(coder: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{coder.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_a_call_whole_and_streamed(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**REQUEST).choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"].startswith("Paris")
    with client.chat.completions.stream(**REQUEST) as stream:
        final = stream.get_final_completion()
    (same,) = final.choices[0].message.tool_calls
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_budget_ends_the_thinking(client: openai.OpenAI) -> None:
    """The prompt opens it, and the model, left to itself, does not end it."""
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "Count to a hundred."},
            {"role": "assistant", "content": "[[[ Well"},
        ],
        "temperature": 0,
        "max_tokens": 12,
    }
    body = {"continue_final_message": True, "thinking_token_budget": 4}
    answer: Any = client.chat.completions.create(**request, extra_body=body)
    message = answer.choices[0].message
    assert message.reasoning
    assert message.content
    assert "]]]" not in message.reasoning + message.content
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens <= 4 + 1
    free: Any = client.chat.completions.create(**request, extra_body={"continue_final_message": True})
    assert free.usage.completion_tokens_details.reasoning_tokens == 12
