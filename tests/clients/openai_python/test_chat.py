"""Chat completions without tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pydantic
import pytest
from weather import PERSON_QUESTION

if TYPE_CHECKING:
    import openai
    from endpoint import Endpoint

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class Person(pydantic.BaseModel):
    name: str
    age: int


def ask(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    return {"model": endpoint.model, "messages": FRANCE, "temperature": 0, "max_tokens": 16} | more


def test_create(talker: openai.OpenAI, text: Endpoint) -> None:
    answer = talker.chat.completions.create(**ask(text))
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == text.model
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_stream_says_the_same(talker: openai.OpenAI, text: Endpoint) -> None:
    whole = talker.chat.completions.create(**ask(text))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with talker.chat.completions.create(**ask(text), **options) as stream:
        *chunks, last = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert last.choices == []
    # The second request finds the prompt's blocks in the cache, which is the only difference.
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]


def test_the_helper_for_streams(talker: openai.OpenAI, text: Endpoint) -> None:
    whole = talker.chat.completions.create(**ask(text, logprobs=True, top_logprobs=2))
    with talker.chat.completions.stream(**ask(text, logprobs=True, top_logprobs=2)) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == (
        whole.choices[0].message.content
    )
    assert final.choices[0].message.content == whole.choices[0].message.content
    tokens = [entry.token for entry in final.choices[0].logprobs.content]
    assert tokens == [entry.token for entry in whole.choices[0].logprobs.content]
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= {
        event.type for event in events
    }


def test_parse_makes_an_object(talker: openai.OpenAI, text: Endpoint) -> None:
    messages = [{"role": "user", "content": PERSON_QUESTION}]
    answer = talker.chat.completions.parse(
        **ask(text, messages=messages, max_tokens=64), response_format=Person
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert json.loads(answer.choices[0].message.content) == person.model_dump()


def test_a_stream_makes_an_object(talker: openai.OpenAI, text: Endpoint) -> None:
    messages = [{"role": "user", "content": PERSON_QUESTION}]
    with talker.chat.completions.stream(
        **ask(text, messages=messages, max_tokens=64), response_format=Person
    ) as stream:
        done = [event for event in stream if event.type == "content.done"]
        final = stream.get_final_completion()
    assert [event.parsed for event in done] == [final.choices[0].message.parsed]
    assert isinstance(done[0].parsed, Person)


def test_several_choices_and_a_stop_string(talker: openai.OpenAI, text: Endpoint) -> None:
    answer = talker.chat.completions.create(**ask(text, n=2, temperature=1.0, seed=3, stop=["Paris", "."]))
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all("Paris" not in choice.message.content for choice in answer.choices)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions(talker: openai.OpenAI, text: Endpoint, role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}, *FRANCE]
    parts = [{"role": role, "content": [{"type": "text", "text": "Be brief."}]}, *FRANCE]
    first, second = (
        talker.chat.completions.create(**ask(text, messages=given)) for given in (messages, parts)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


def test_raw_and_streamed_responses(talker: openai.OpenAI, text: Endpoint) -> None:
    raw = talker.chat.completions.with_raw_response.create(**ask(text))
    assert raw.headers["x-request-id"]
    parsed = raw.parse()
    assert "Paris" in parsed.choices[0].message.content
    assert parsed._request_id == raw.headers["x-request-id"]
    with talker.chat.completions.with_streaming_response.create(**ask(text, stream=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"


async def test_the_asynchronous_client(text: Endpoint) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=text.api, api_key=text.key, max_retries=0) as client:
        stream = await client.chat.completions.create(**ask(text, stream=True))
        content = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Paris" in content


def test_a_stream_that_is_left_ends_in_the_server(talker: openai.OpenAI, text: Endpoint) -> None:
    with talker.chat.completions.create(**ask(text, stream=True, max_tokens=1000)) as stream:
        next(iter(stream))
        assert text.metric("num_requests_running") == 1
    text.wait_until_idle()


def test_the_models(talker: openai.OpenAI, text: Endpoint) -> None:
    assert text.model in [model.id for model in talker.models.list()]
    model = talker.models.retrieve(text.model)
    assert (model.id, model.object) == (text.model, "model")
