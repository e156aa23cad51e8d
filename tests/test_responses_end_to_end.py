"""The Responses API with the real model, as OpenAI's own client reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pydantic
import pytest
import trio
from openai.types.responses import Response

from served import MODEL, STEADY, ServedModel, served, wait_for
from trioserve.server.responses.home import open_response_store
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = {"min_tokens": 4000, "ignore_eos": True}


class Person(pydantic.BaseModel):
    age: int = pydantic.Field(ge=0, le=99)


class LookUp(pydantic.BaseModel):
    """Looks up a word."""

    word: str = pydantic.Field(max_length=8)


@pytest.fixture
def client(server: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as opened:
        yield opened


def ask(**more: Any) -> dict[str, Any]:
    question = "What is the capital of Japan?"
    return {"model": MODEL, "input": question, "temperature": 0, "max_output_tokens": 8} | more


def test_create_and_go_on(client: openai.OpenAI) -> None:
    first = client.responses.create(**ask(metadata={"topic": "geography"}))
    assert first.status == "completed"
    assert "Tokyo" in first.output_text
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(**ask(input="Say that again.", previous_response_id=first.id))
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    replayed = client.responses.create(
        **ask(
            input=[
                {"role": "user", "content": ask()["input"]},
                *first.output,
                {"role": "user", "content": "Say that again."},
            ]
        )
    )
    assert replayed.output_text == second.output_text
    items = client.responses.input_items.list(second.id).data
    assert [item.content[0].text for item in items] == ["Say that again."]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ask())
    text = ""
    with client.responses.stream(**ask()) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_what_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(**ask(max_output_tokens=2))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_parse(client: openai.OpenAI) -> None:
    question = "Bob is 42 years old. Tell me that as JSON."
    request = ask(input=question, text_format=Person, max_output_tokens=16)
    parsed = client.responses.parse(**request)
    assert isinstance(parsed.output_parsed, Person)
    with client.responses.stream(**request) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed


def test_a_call_and_its_answer(client: openai.OpenAI) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(LookUp)["function"] | {"type": "function"}]
    request = ask(
        input="Look up the word cat.", tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    request["max_output_tokens"] = 48
    with client.responses.stream(**request) as stream:
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    assert LookUp(**json.loads(call.arguments))
    assert isinstance(call.parsed_arguments, LookUp) or call.parsed_arguments is not None
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "a small animal"}
    response = client.responses.create(
        **ask(input=[answer], previous_response_id=final.id, tools=tools, tool_choice="none")
    )
    assert response.output_text


def test_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(**ask(include=["message.output_text.logprobs"], top_logprobs=2))
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert response.usage is not None
    assert len(part.logprobs) == response.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_the_background(client: openai.OpenAI, server: ServedModel) -> None:
    begun = client.responses.create(**ask(background=True))
    assert begun.status in {"queued", "in_progress"}
    wait_for(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text == client.responses.create(**ask()).output_text
    long = client.responses.create(**ask(background=True, max_output_tokens=4000, extra_body=LONG))
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    server.wait_until_idle()


def test_a_background_stream_is_taken_up_again(client: openai.OpenAI, server: ServedModel) -> None:
    seen = []
    with client.responses.create(**ask(background=True, stream=True)) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    assert seen[0].type == "response.created"
    response_id, last = seen[0].response.id, seen[-1].sequence_number
    with client.responses.retrieve(response_id, stream=True, starting_after=last) as stream:
        seen += stream
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    assert client.responses.retrieve(response_id, stream=False) == seen[-1].response


def test_who_leaves_ends_the_work(client: openai.OpenAI, server: ServedModel) -> None:
    with client.responses.create(**ask(stream=True, max_output_tokens=4000, extra_body=LONG)) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    server.wait_until_idle()


async def test_a_drain_ends_the_background_and_a_file_outlives_it(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    flags = ["--responses-store", str(path), "--shutdown-timeout", "0.2", "--dtype", STEADY]
    short, long = await trio.to_thread.run_sync(make_two_and_end, tmp_path, flags)
    async with open_response_store(ServerArgs(responses_store=str(path))) as store:
        assert store is not None
        kept = {}
        for name, response in (("short", short), ("long", long)):
            stored = await store.get("address:127.0.0.1", response.id)
            assert stored is not None
            kept[name] = Response.model_validate_json(stored.response)
    assert kept["short"] == short
    assert kept["long"].error is not None
    assert (kept["long"].status, kept["long"].error.code) == ("failed", "server_error")


def make_two_and_end(directory: Path, flags: list[str]) -> tuple[Response, Response]:
    with (
        served(directory, flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        short = client.responses.create(**ask(max_output_tokens=2))
        long = client.responses.create(**ask(background=True, max_output_tokens=8000, extra_body=LONG))
        assert server.terminate() == 0, server.log
        assert "Traceback" not in server.log, server.log
    return short, long
