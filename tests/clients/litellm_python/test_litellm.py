"""litellm, as a client of chat completions, responses and messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import litellm
import pytest
from weather import WEATHER, WEATHER_QUESTION

if TYPE_CHECKING:
    from endpoint import Endpoint

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER},
}


def ask(endpoint: Endpoint, provider: str, content: str, **more: Any) -> dict[str, Any]:
    return {
        "model": f"{provider}/{endpoint.model}",
        "messages": [{"role": "user", "content": content}],
        "api_base": endpoint.api,
        "api_key": endpoint.key,
        "temperature": 0,
        "max_tokens": 64,
    } | more


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_whole_and_streamed(tools: Endpoint, provider: str) -> None:
    request = ask(tools, provider, "What is the capital of France?")
    whole = litellm.completion(**request).choices[0].message.content
    chunks = list(litellm.completion(**request, stream=True))
    assert "Paris" in whole
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == whole


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool(tools: Endpoint, choice: str) -> None:
    request = ask(tools, "openai", WEATHER_QUESTION, tools=[TOOL], tool_choice=choice)
    whole = litellm.completion(**request).choices[0].message
    built = litellm.stream_chunk_builder(list(litellm.completion(**request, stream=True))).choices[0].message
    for message in (whole, built):
        function = message.tool_calls[0].function
        assert (function.name, json.loads(function.arguments)) == ("get_weather", {"city": "Paris"})


def test_responses(tools: Endpoint) -> None:
    response = litellm.responses(
        model=f"openai/{tools.model}", input="What is the capital of France?", api_base=tools.api,
        api_key=tools.key, temperature=0, max_output_tokens=32,
    )  # fmt: skip
    assert "Paris" in response.output[0].content[0].text


def test_messages(tools: Endpoint) -> None:
    request = ask(tools, "anthropic", "What is the capital of France?", api_base=tools.url)
    assert "Paris" in litellm.completion(**request).choices[0].message.content


def test_errors(tools: Endpoint) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**ask(tools, "openai", "Hello", top_p=7.0))


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_embeddings(embeddings: Endpoint, provider: str) -> None:
    answer = litellm.embedding(
        model=f"{provider}/{embeddings.model}", input=["one", "two"], api_base=embeddings.api,
        api_key=embeddings.key, encoding_format="float",
    )  # fmt: skip
    assert [len(item["embedding"]) for item in answer.data] == [384, 384]
    assert answer.usage.prompt_tokens == 6


@pytest.mark.parametrize("provider", ["hosted_vllm", "jina_ai", "cohere"])
def test_rerank(embeddings: Endpoint, provider: str) -> None:
    path = {"hosted_vllm": "", "jina_ai": "/v1/rerank", "cohere": "/v2/rerank"}[provider]
    answer = litellm.rerank(
        model=f"{provider}/{embeddings.model}", query="A cat sat on the mat.",
        documents=["Interest rates rose in May.", "A kitten was sitting on a rug."], top_n=1,
        api_base=f"{embeddings.url}{path}", api_key=embeddings.key,
    )  # fmt: skip
    assert answer.results[0]["index"] == 1
