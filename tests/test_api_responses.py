"""POST /v1/responses and what can be asked of its responses: everything but the background."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import helpers_api
from helpers_api import Answer, FakeLLM
from helpers_responses import PATH, Api, Event, PacedLLM, names, read_events, serving
from trioserve.errors import EngineGenerateError
from trioserve.outputs import FinishReason
from trioserve.server.responses import context

if TYPE_CHECKING:
    from pathlib import Path

TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Looks up a word",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}


def accumulate(events: list[Event]) -> list[dict[str, Any]]:
    """The output, from the events of its items alone."""
    output: list[dict[str, Any]] = []
    for event in events:
        data = event.data
        match event.name.removeprefix("response."):
            case "output_item.added":
                assert data["output_index"] == len(output)
                output.append(data["item"])
            case "content_part.added":
                assert data["content_index"] == len(output[data["output_index"]]["content"])
                output[data["output_index"]]["content"].append(data["part"])
            case "output_text.delta" | "reasoning_text.delta":
                part = output[data["output_index"]]["content"][data["content_index"]]
                part["text"] += data["delta"]
                if "logprobs" in part:
                    part["logprobs"] += data["logprobs"]
            case "function_call_arguments.delta":
                output[data["output_index"]]["arguments"] += data["delta"]
            case "output_item.done":
                output[data["output_index"]]["status"] = data["item"]["status"]
    return output


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two runs of one request."""
    left = {key: value for key, value in response.items() if key not in {"id", "created_at", "completed_at"}}
    return left | {"output": [{**item, "id": None} for item in left["output"]]}


# Whole responses


async def test_a_response() -> None:
    async with serving() as api:
        reply = await api.create(instructions="Be kind.", metadata={"a": "b"}, user="me")
        response = reply.json
        assert (response["object"], response["status"], response["model"]) == (
            "response", "completed", "small",
        )  # fmt: skip
        (item,) = response["output"]
        assert item["content"] == [
            {"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}
        ]
        assert item["id"].startswith("msg_")
        assert response["id"].startswith("resp_")
        assert response["completed_at"] >= response["created_at"]
        assert response["error"] is response["incomplete_details"] is None
        assert (response["instructions"], response["metadata"]) == ("Be kind.", {"a": "b"})
        assert (response["user"], response["service_tier"], response["store"]) == ("me", "default", True)
        assert response["usage"] == {
            "input_tokens": 6, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 9,
        }  # fmt: skip
        assert api.llm.rendered[0]["messages"] == [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi there"},
        ]


async def test_what_the_request_says_comes_back() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 20, "max_tool_calls": 3,
        "parallel_tool_calls": False, "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "truncation": "disabled",
        "prompt_cache_key": "p", "safety_identifier": "s", "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
    }  # fmt: skip
    async with serving() as api:
        response = (await api.create(**given)).json
        assert {name: response[name] for name in given} == given
        (call,) = api.llm.calls
        assert (call.params.temperature, call.params.top_p, call.params.max_tokens) == (0.5, 0.9, 20)
        assert call.params.structured_outputs is not None
        kwargs = api.llm.rendered[0]["template_kwargs"]
        assert (kwargs["reasoning_effort"], kwargs["verbosity"]) == ("low", "low")


async def test_tools_come_back_as_they_were() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look_up"}]}
    other = TOOL | {"name": "other"}
    async with serving() as api:
        response = (await api.create(tools=[TOOL, other], tool_choice=choice)).json
        assert [tool["name"] for tool in response["tools"]] == ["look_up", "other"]
        assert response["tools"][0] == TOOL | {"strict": None}
        assert response["tool_choice"] == choice
        (shown,) = api.llm.rendered[0]["tools"]
        assert shown["function"]["name"] == "look_up"


async def test_a_format_with_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    async with serving() as api:
        response = (await api.create(text={"format": form})).json
        assert response["text"] == {"format": form, "verbosity": None}
        wanted = api.llm.calls[0].params.structured_outputs
        assert wanted is not None
        assert wanted.json is not None


@pytest.mark.parametrize(
    ("reason", "status", "details", "item_status"),
    [
        (FinishReason.STOP, "completed", None, "completed"),
        (FinishReason.LENGTH, "incomplete", {"reason": "max_output_tokens"}, "incomplete"),
        (FinishReason.REPETITION, "incomplete", {}, "incomplete"),
    ],
)
async def test_how_it_ended(reason: FinishReason, status: str, details: Any, item_status: str) -> None:
    async with serving(Answer(reason=reason)) as api:
        response = (await api.create()).json
        assert (response["status"], response["incomplete_details"]) == (status, details)
        assert response["output"][0]["status"] == item_status
        assert (response["completed_at"] is None) == (status != "completed")
        last = (await api.stream())[-1]
        assert last.name == f"response.{status}"
        assert last.data["response"]["incomplete_details"] == details


async def test_an_answer_without_a_word_is_an_empty_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers_api, "VOCABULARY", [*helpers_api.VOCABULARY, b""])
    async with serving(Answer(token_ids=(12,))) as api:
        (item,) = (await api.create()).json["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", "")
        assert names(await api.stream())[-3:] == ["content_part.done", "output_item.done", "completed"]


async def test_logprobs() -> None:
    answer = Answer(alternatives=((2, -0.25, 1),), sampled_rank=2)
    async with serving(answer) as api:
        response = (await api.create(include=["message.output_text.logprobs"], top_logprobs=1)).json
        entries = response["output"][0]["content"][0]["logprobs"]
        assert [entry["token"] for entry in entries] == ["Hello", ",", " world"]
        assert entries[0] == {
            "token": "Hello", "logprob": -0.5, "bytes": list(b"Hello"),
            "top_logprobs": [{"token": " world", "logprob": -0.25, "bytes": list(b" world")}],
        }  # fmt: skip
        assert response["top_logprobs"] == 1


# Streams


async def test_the_events_of_a_stream() -> None:
    async with serving() as api:
        events = await api.stream()
        assert names(events) == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done", "completed",
        ]  # fmt: skip
        assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
        (item,) = events[-1].data["response"]["output"]
        about_items = [event.data for event in events if "item_id" in event.data]
        assert {data["item_id"] for data in about_items} == {item["id"]}
        assert events[0].data["response"]["status"] == "in_progress"
        assert events[0].data["response"]["output"] == []


@pytest.mark.parametrize("wants_logprobs", [False, True])
async def test_a_stream_is_the_whole_response(wants_logprobs: bool) -> None:
    request = {"top_logprobs": 2} if wants_logprobs else {}
    answer = Answer(token_ids=(8, 9, 10, 3, 0), hidden=(3,), reason=FinishReason.LENGTH)
    async with serving(answer) as api:
        whole = (await api.create(**request)).json
        events = await api.stream(**request)
        final = events[-1].data["response"]
        assert accumulate(events) == final["output"]
        assert without_names(final) == without_names(whole)
        assert (await api.get(final["id"])).json == final
        assert (await api.get(whole["id"])).json == whole


async def test_an_error_after_the_first_event_is_told_by_the_response() -> None:
    async with serving(Answer(error=EngineGenerateError("secret"))) as api:
        events = await api.stream()
        assert names(events)[-1] == "failed"
        response = events[-1].data["response"]
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert response["output"][0]["status"] == "incomplete"
        assert "secret" not in str(response)
        assert (await api.get(response["id"])).status == 404


async def test_an_error_before_the_first_event_is_a_status() -> None:
    async with serving(Answer(token_ids=(), error=EngineGenerateError("no"))) as api:
        api.llm.play = lambda call: [EngineGenerateError("no")]  # type: ignore[method-assign]
        assert (await api.create(stream=True)).status == 500
        assert (await api.create()).status == 500


async def test_who_leaves_ends_the_work_and_nothing_is_kept() -> None:
    llm = PacedLLM()
    async with serving(llm) as api, trio.open_nursery() as nursery:
        exchange = api.exchange("POST", PATH, {"input": "Hi", "stream": True})
        nursery.start_soon(exchange.run)
        llm.let(2)
        await wait_all_tasks_blocked()
        assert len(llm.running) == 1
        (begun, *_) = read_events(exchange.received)
        exchange.leave()
        await wait_all_tasks_blocked()
        assert not llm.running
        assert (await api.get(begun.data["response"]["id"])).status == 404


async def test_the_deadline_ends_a_stream_with_a_failed_response(
    autojump_clock: trio.testing.MockClock,
) -> None:
    llm = PacedLLM()
    llm.let(2)
    async with serving(llm) as api:
        events = await api.stream(timeout=5)
        assert names(events)[-1] == "failed"
        assert "deadline" in events[-1].data["response"]["error"]["message"]
        assert not llm.running


async def test_a_stream_that_waited_and_never_began(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(PacedLLM(), sse_keep_alive_interval=1) as api:
        (only,) = await api.stream(timeout=5)
        assert (only.name, only.data["code"]) == ("error", "deadline_exceeded")


# Items


async def rendered(api: Api, items: list[dict[str, Any]], **request: Any) -> list[dict[str, Any]]:
    reply = await api.create(input=items, **request)
    assert reply.status == 200, reply.body
    found: list[dict[str, Any]] = api.llm.rendered[-1]["messages"]
    return found


async def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look"},
                                                        {"type": "input_text", "text": "it up"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I will.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"word": "it"}'},
        {"type": "function_call", "call_id": "c2", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "gone"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
        {"role": "user", "content": "Why?"},
    ]  # fmt: skip
    async with serving() as api:
        first = {"name": "look_up", "arguments": {"word": "it"}}
        second = {"name": "look_up", "arguments": {}}
        assert await rendered(api, items) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look\nit up"},
            {
                "role": "assistant", "content": "I will.", "reasoning_content": "Hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": first},
                    {"id": "c2", "type": "function", "function": second},
                ],
            },
            {"role": "tool", "content": "found", "tool_call_id": "c1", "name": "look_up"},
            {"role": "tool", "content": "gone", "tool_call_id": "c2", "name": "look_up"},
            {"role": "assistant", "content": "No more."},
            {"role": "user", "content": "Why?"},
        ]  # fmt: skip


async def test_a_call_with_wrong_arguments_is_a_call() -> None:
    """Models write such things; then clients tell them, and go on."""
    items = [
        {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": '{"word": }'},
        {"type": "function_call_output", "call_id": "c", "output": "That was no JSON."},
    ]
    async with serving() as api:
        first = (await api.create(input=items)).json
        messages = await rendered(
            api, [{"role": "user", "content": "Go on"}], previous_response_id=first["id"]
        )
        assert messages[0]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {}}
        assert messages[1]["content"] == "That was no JSON."
        listed = (await api.items(first["id"], "order=asc")).json["data"]
        assert listed[0]["arguments"] == '{"word": }'


async def test_what_was_called_wrongly_can_be_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'<tool_call>\n{"name": "look_up", "arguments": {"word": }}\n</tool_call>'
    monkeypatch.setattr(helpers_api, "VOCABULARY", [*helpers_api.VOCABULARY, text])
    async with serving(Answer(token_ids=(12,)), tool_call_parser="hermes") as api:
        first = (await api.create(tools=[TOOL])).json
        (call,) = first["output"]
        assert (call["arguments"], call["status"]) == ('{"word": }', "completed")
        answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "no JSON"}
        for request in (
            {"input": [answer], "previous_response_id": first["id"]},
            {"input": [{"role": "user", "content": "Hi"}, call, answer]},
        ):
            assert (await api.create(**request)).status == 200
            tool = api.llm.rendered[-1]["messages"][-1]
            assert (tool["role"], tool["tool_call_id"]) == ("tool", call["call_id"])


async def test_ids_that_a_list_has_twice_do_not_lead_in_circles() -> None:
    items = [{"role": "user", "content": str(number), "id": "msg_1"} for number in range(3)]
    async with serving() as api:
        response_id = (await api.create(input=items)).json["id"]
        seen: list[str] = []
        query = "order=asc&limit=1"
        while len(seen) < 10:
            page = (await api.items(response_id, query)).json
            seen += [item["content"][0]["text"] for item in page["data"]]
            if not page["has_more"]:
                break
            query = f"order=asc&limit=1&after={page['last_id']}"
        assert seen == ["0", "1", "2"]


async def test_the_input_is_listed_in_pages() -> None:
    items = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "Four"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Five"}]},
        {"role": "user", "content": "Six"},
    ]
    async with serving() as api:
        response_id = (await api.create(input=items)).json["id"]
        everything = (await api.items(response_id, "order=asc")).json
        kinds = [item["type"] for item in everything["data"]]
        assert kinds == [
            "message",
            "message",
            "function_call",
            "function_call_output",
            "reasoning",
            "message",
        ]
        assert everything["has_more"] is False
        ids = [item["id"] for item in everything["data"]]
        assert len(set(ids)) == 6
        backwards = (await api.items(response_id)).json
        assert [item["id"] for item in backwards["data"]] == ids[::-1]

        seen: list[str] = []
        query = "order=asc&limit=4"
        while True:
            page = (await api.items(response_id, query)).json
            seen += [item["id"] for item in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            query = f"order=asc&limit=4&after={page['last_id']}"
        assert seen == ids


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"),
        ("after=nobody", "after"), ("include=everything", "include"),
    ],
)  # fmt: skip
async def test_wrong_queries_of_the_list(query: str, parameter: str) -> None:
    async with serving() as api:
        reply = await api.items((await api.create()).json["id"], query)
        assert (reply.status, reply.error["param"]) == (400, parameter)


# Conversations


async def test_a_response_goes_on_from_another() -> None:
    async with serving() as api:
        first = (await api.create(input="One", instructions="First.")).json
        second = (await api.create(input="Two", previous_response_id=first["id"])).json
        assert second["previous_response_id"] == first["id"]
        assert second["instructions"] is None
        await api.create(input="Three", previous_response_id=second["id"], instructions="Last.")
        assert [(m["role"], m["content"]) for m in api.llm.rendered[-1]["messages"]] == [
            ("system", "Last."), ("user", "One"), ("assistant", "Hello, world"), ("user", "Two"),
            ("assistant", "Hello, world"), ("user", "Three"),
        ]  # fmt: skip
        (item,) = (await api.items(second["id"])).json["data"]
        assert item["content"] == [{"type": "input_text", "text": "Two"}]


async def test_it_goes_on_without_an_input() -> None:
    async with serving() as api:
        first = (await api.create(input="One")).json
        assert (await api.call("POST", PATH, {"previous_response_id": first["id"]})).status == 200
        assert len(api.llm.rendered[-1]["messages"]) == 2


async def test_an_item_can_be_referred_to() -> None:
    async with serving() as api:
        first = (await api.create(input="One")).json
        (given,) = (await api.items(first["id"])).json["data"]
        said = first["output"][0]["id"]
        items = [
            {"type": "item_reference", "id": given["id"]},
            {"id": said},
            {"role": "user", "content": "Two"},
        ]
        messages = await rendered(api, items)
        assert [message["content"] for message in messages] == ["One", "Hello, world", "Two"]
        reply = await api.create(input=[{"type": "item_reference", "id": said[:-1] + "7"}])
        assert (reply.status, reply.error["param"]) == (404, "input[0].id")
        for strange in ("msg_1", "", "x" * 1000):
            assert (await api.create(input=[{"type": "item_reference", "id": strange}])).status == 404


async def test_an_item_is_referred_to_once() -> None:
    async with serving() as api:
        said = (await api.create(input="One")).json["output"][0]["id"]
        reply = await api.create(input=[{"type": "item_reference", "id": said}] * 2)
        assert (reply.status, reply.error["param"]) == (400, "input[1].id")


@pytest.mark.parametrize("store", ["memory", "file"])
async def test_a_short_request_cannot_bring_up_all_that_was_ever_said(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "memory" if store == "memory" else str(tmp_path / "responses.sqlite")
    async with serving(responses_store=path) as api:
        first = (await api.create(input="One")).json
        second = (await api.create(input="Two", previous_response_id=first["id"])).json
        size = len(json.dumps(first)) + len(json.dumps(second))
        monkeypatch.setattr(context, "MAX_CONTEXT_BYTES", size)  # the inputs are too much
        assert (await api.create(previous_response_id=first["id"])).status == 200
        reply = await api.create(previous_response_id=second["id"])
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
        assert reply.error["code"] == "context_length_exceeded"
        references = [
            {"type": "item_reference", "id": response["output"][0]["id"]} for response in (first, second)
        ]
        assert (await api.create(input=references[:1])).status == 200
        reply = await api.create(input=references)
        assert (reply.status, reply.error["param"]) == (400, "input[1].id")
        monkeypatch.undo()
        assert (await api.create(input=references)).status == 200
        monkeypatch.setattr(context, "MAX_MESSAGES", 3)
        reply = await api.create(previous_response_id=second["id"])
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")


async def test_what_is_gone_cannot_be_gone_on_from() -> None:
    async with serving() as api:
        first = (await api.create(input="One")).json
        second = (await api.create(input="Two", previous_response_id=first["id"])).json
        await api.delete(first["id"])
        for previous in (first["id"], second["id"], "resp_nothing"):
            reply = await api.create(previous_response_id=previous)
            assert reply.status == 400
            assert (reply.error["param"], reply.error["code"]) == (
                "previous_response_id",
                "previous_response_not_found",
            )
        assert not api.llm.running


async def test_what_is_too_long_loses_its_beginning() -> None:
    words = " ".join(["word"] * 20)
    items = [
        {"role": "system", "content": "Stay"},
        *({"role": role, "content": f"{number} {words}"}
          for number, role in enumerate(["user", "assistant"] * 2)),
        {"role": "user", "content": "End"},
    ]  # fmt: skip
    async with serving() as api:
        refused = await api.create(input=items)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert refused.error["param"] == "input"
        messages = await rendered(api, items, truncation="auto", max_output_tokens=4)
        # 64 tokens: "system: Stay" and "user: End" are 4, and each of the others is 22.
        assert [message["content"].partition(" ")[0] for message in messages] == ["Stay", "2", "3", "End"]
        short = await rendered(api, items[-1:], truncation="auto")
        assert len(short) == 1


async def test_the_tokens_of_an_input_are_counted() -> None:
    async with serving() as api:
        reply = await api.call(
            "POST", f"{PATH}/input_tokens", {"input": "Hi there", "instructions": "Be kind."}
        )
        assert reply.json == {"object": "response.input_tokens", "input_tokens": 6}
        assert not api.llm.calls
        first = (await api.create(input="One")).json["id"]
        reply = await api.call("POST", f"{PATH}/input_tokens", {"previous_response_id": first})
        assert reply.json["input_tokens"] == 2 + 3


# Kept or not


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with serving() as api:
        response = (await api.create(store=False)).json
        assert response["store"] is False
        assert (await api.get(response["id"])).status == 404
        assert (await api.items(response["id"])).status == 404
        assert (await api.delete(response["id"])).status == 404


async def test_a_server_without_a_store() -> None:
    async with serving(responses_store="none") as api:
        response = (await api.create()).json
        assert response["store"] is False
        assert (await api.get(response["id"])).status == 404
        reply = await api.create(background=True)
        assert (reply.status, reply.error["param"]) == (400, "background")
        assert (await api.create(previous_response_id=response["id"])).status == 400


async def test_delete() -> None:
    async with serving() as api:
        response_id = (await api.create()).json["id"]
        assert (await api.delete(response_id)).json == {
            "id": response_id, "object": "response", "deleted": True,
        }  # fmt: skip
        assert (await api.get(response_id)).status == 404
        assert (await api.delete(response_id)).status == 404


async def test_another_key_finds_nothing() -> None:
    async with serving(api_key=("mine", "other")) as api:
        created = (await api.create(key="mine")).json
        response_id, item_id = created["id"], created["output"][0]["id"]
        unknown = response_id[:-1] + ("0" if response_id[-1] != "0" else "1")
        for call in (api.get, api.cancel, api.delete, api.items):
            foreign, missing = await call(response_id, key="other"), await call(unknown, key="other")
            assert (foreign.status, missing.status) == (404, 404)
            assert foreign.error["message"].replace(response_id, "") == missing.error["message"].replace(
                unknown, ""
            )
        reply = await api.create(key="other", previous_response_id=response_id)
        assert reply.error["code"] == "previous_response_not_found"
        reply = await api.create(key="other", input=[{"type": "item_reference", "id": item_id}])
        assert reply.error["code"] == "item_not_found"
        assert (await api.get(response_id, key="mine")).json == created


# Refusals


@pytest.mark.parametrize(
    ("request_", "parameter"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "no spaces"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                           "tools": [{"type": "function", "name": "other"}]}},
         "tool_choice.tools[0].name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text.format"),
        ({"tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
         "text.format"),
        ({"text": {"verbosity": "endless"}}, "text.verbosity"),
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"n" * 65: "x"}}, "metadata"),
        ({"metadata": {"n": "v" * 513}}, "metadata"),
        ({"metadata": {"n": 3}}, "metadata[n]"),
        ({"safety_identifier": "s" * 65}, "safety_identifier"),
        ({"truncation": "some"}, "truncation"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
async def test_what_is_refused(request_: dict[str, Any], parameter: str) -> None:
    async with serving() as api:
        reply = await api.create(**request_)
        assert reply.status == (404 if parameter == "model" else 400), reply.body
        assert reply.error["param"] == parameter
        assert parameter.partition("[")[0].partition(".")[0] in reply.error["message"]
        assert not api.llm.calls


async def test_routes_that_are_not_there() -> None:
    async with serving() as api:
        assert (await api.call("POST", f"{PATH}/compact", {})).status == 404
        assert (await api.call("POST", "/v1/conversations", {})).status == 404
        assert (await api.get("nothing")).status == 404


async def test_only_background_responses_are_cancelled_or_streamed_again() -> None:
    async with serving() as api:
        response_id = (await api.create()).json["id"]
        for reply in (await api.cancel(response_id), await api.get(response_id, "stream=true")):
            assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert (await api.get(response_id, "starting_after=1")).error["param"] == "starting_after"
        assert (await api.get(response_id, "stream=maybe")).error["param"] == "stream"


async def test_an_application_that_nobody_gave_a_background() -> None:
    from helpers_api import Client

    reply = await Client(FakeLLM()).post(PATH, {"input": "Hi", "background": True})
    assert (reply.status, reply.error["param"]) == (400, "background")
