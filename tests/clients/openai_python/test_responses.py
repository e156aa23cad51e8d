"""The Responses API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pydantic
import pytest
from weather import PERSON_QUESTION, WEATHER, WEATHER_QUESTION, WEATHER_REPORT

if TYPE_CHECKING:
    from endpoint import Endpoint

TOOL: dict[str, Any] = {
    "type": "function", "name": "get_weather", "description": "The weather of a city",
    "parameters": WEATHER, "strict": True,
}  # fmt: skip


class Person(pydantic.BaseModel):
    name: str
    age: int


def ask(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "input": "What is the capital of France?",
        "temperature": 0,
        "max_output_tokens": 24,
    } | more


def test_create(talker: openai.OpenAI, text: Endpoint) -> None:
    response = talker.responses.create(**ask(text))
    assert response.object == "response"
    assert "Paris" in response.output_text
    assert response.status in {"completed", "incomplete"}
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert [item.type for item in response.output] == ["message"]


def test_an_answer_that_is_cut_off(talker: openai.OpenAI, text: Endpoint) -> None:
    response = talker.responses.create(**ask(text, max_output_tokens=2))
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_stream_of_events(talker: openai.OpenAI, text: Endpoint) -> None:
    whole = talker.responses.create(**ask(text))
    with talker.responses.create(**ask(text, stream=True)) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text


def test_the_helper_for_streams(talker: openai.OpenAI, text: Endpoint) -> None:
    with talker.responses.stream(**ask(text, max_output_tokens=64)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert done.text == final.output_text
    assert final.id == events[0].response.id


def test_parse_makes_an_object(talker: openai.OpenAI, text: Endpoint) -> None:
    response = talker.responses.parse(
        **ask(text, input=PERSON_QUESTION, max_output_tokens=64), text_format=Person
    )
    assert isinstance(response.output_parsed, Person)


def test_a_stream_makes_an_object(talker: openai.OpenAI, text: Endpoint) -> None:
    with talker.responses.stream(
        **ask(text, input=PERSON_QUESTION, max_output_tokens=64), text_format=Person
    ) as stream:
        stream.until_done()
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Person)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "get_weather"}], ids=str)
def test_a_call_and_its_result(caller: openai.OpenAI, tools: Endpoint, choice: Any) -> None:
    fields = ask(tools, max_output_tokens=64)
    first = caller.responses.create(
        **fields | {"input": WEATHER_QUESTION}, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
    )
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "get_weather", {"city": "Paris"},
    )  # fmt: skip
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_REPORT}
    second = caller.responses.create(**fields | {"input": [result]}, previous_response_id=first.id)
    assert "17" in second.output_text
    by_hand = [{"role": "user", "content": WEATHER_QUESTION}, call, result]
    assert caller.responses.create(**fields | {"input": by_hand}).output_text == second.output_text


def test_a_call_in_a_stream(caller: openai.OpenAI, tools: Endpoint) -> None:
    fields = ask(tools, tools=[TOOL], max_output_tokens=64, input=WEATHER_QUESTION)
    with caller.responses.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == json.loads(call.arguments) == {"city": "Paris"}
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert (done.arguments, done.name) == (call.arguments, "get_weather")


def test_what_is_stored(talker: openai.OpenAI, text: Endpoint) -> None:
    response = talker.responses.create(**ask(text))
    assert talker.responses.retrieve(response.id).output_text == response.output_text
    (item,) = talker.responses.input_items.list(response.id)
    assert item.role == "user"
    talker.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        talker.responses.retrieve(response.id)


def test_nothing_is_stored_unasked(talker: openai.OpenAI, text: Endpoint) -> None:
    response = talker.responses.create(**ask(text, store=False))
    with pytest.raises(openai.NotFoundError):
        talker.responses.retrieve(response.id)


def test_a_response_in_the_background(talker: openai.OpenAI, text: Endpoint) -> None:
    fields = ask(text, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    response = talker.responses.create(**fields)
    assert response.status in {"queued", "in_progress"}
    assert talker.responses.cancel(response.id).status == "cancelled"
    text.wait_until_idle()
    assert talker.responses.retrieve(response.id).status == "cancelled"


def test_a_stream_is_replayed(talker: openai.OpenAI, text: Endpoint) -> None:
    with talker.responses.create(**ask(text, background=True, stream=True)) as stream:
        events = list(stream)
    with talker.responses.retrieve(events[0].response.id, stream=True, starting_after=3) as stream:
        again = list(stream)
    assert again == events[4:]


def test_errors(talker: openai.OpenAI, text: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        talker.responses.create(**ask(text, temperature=-1))
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        talker.responses.create(**ask(text, previous_response_id="resp_none"))
    assert caught.value.param == "previous_response_id"


def test_tokens_are_counted(talker: openai.OpenAI, text: Endpoint) -> None:
    counted = talker.responses.input_tokens.count(model=text.model, input="What is the capital of France?")
    assert counted.input_tokens == talker.responses.create(**ask(text)).usage.input_tokens
