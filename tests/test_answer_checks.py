"""The check of all answers finds what is wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from quart import Response

from answer_checks import NOWHERE, NOWHERE_OF_ANTHROPIC, Answer, Operation, WrongAnswerError, operations
from helpers_api import Client, FakeLLM
from openai_schemas import check_schema, openai_schema
from trioserve.server.openapi_routes import ROUTES

if TYPE_CHECKING:
    from response_checks import WrongAnswers

MESSAGES = [{"role": "user", "content": "Hi"}]


def media_types(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = operation.responses.get("200", {}).get("content", {})
    return content


WITH_JSON, WITH_EVENTS = (
    [key for key, operation in operations().items() if media in media_types(operation)]
    for media in ("application/json", "text/event-stream")
)


def judge(operation: Operation, body: bytes, media_type: str = "application/json", status: int = 200) -> None:
    answer = Answer(operation, status, media_type)
    answer.take(body)
    answer.end()


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.mark.parametrize(("method", "path"), WITH_JSON)
def test_an_answer_that_is_not_an_object_is_found_on_every_route(method: str, path: str) -> None:
    with pytest.raises(WrongAnswerError):
        judge(operations()[method, path], b'"x"')


@pytest.mark.parametrize(("method", "path"), WITH_EVENTS)
def test_an_event_of_no_kind_is_found_on_every_route(method: str, path: str) -> None:
    with pytest.raises(WrongAnswerError):
        judge(operations()[method, path], event({"object": "x"}), "text/event-stream")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_an_error_without_its_parts_is_found_on_every_route(route: Any) -> None:
    with pytest.raises(WrongAnswerError):
        judge(operations()[route.method, route.path], b'{"error": {"message": "x"}}', status=400)


def test_a_status_and_a_media_type_that_nobody_described_are_found() -> None:
    models = operations()["get", "/v1/models"]
    for status, media_type in ((201, "application/json"), (200, "text/html"), (418, "application/json")):
        with pytest.raises(WrongAnswerError, match="says nothing of such answers"):
            judge(models, b"{}", media_type, status)
    with pytest.raises(WrongAnswerError, match="no such route"):
        judge(NOWHERE, b"{}")


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 1}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_object"}}}),
        ("/v1/models", None),
        ("/v1/models/small", None),
    ],
)
async def test_every_key_that_openai_demands_is_missed(path: str, request_body: Any) -> None:
    client = Client(FakeLLM())
    reply = await (client.get(path) if request_body is None else client.post(path, request_body))
    method = "get" if request_body is None else "post"
    name = openai_schema(method, path.replace("small", "{model}"), is_event=False)
    assert name is not None
    check_schema(name, reply.json)
    for without in broken(reply.json):
        with pytest.raises(WrongAnswerError):
            judge(operations()[method, path.replace("small", "{model}")], json.dumps(without).encode())


def broken(value: Any) -> list[Any]:
    """`value` without one of its keys, each in turn; and with one too many, anywhere."""
    if isinstance(value, list):
        return [[part, *value[1:]] for part in broken(value[0])] if value else []
    if not isinstance(value, dict) or not value:
        return []
    found = [{key: part for key, part in value.items() if key != left_out} for left_out in value]
    for key, part in value.items():
        if key not in {"top_logprobs", "format"}:  # of completions: any tokens; of responses: any schema
            found += [{**value, key: changed} for changed in broken(part)]
    return [*found, {**value, "unheard_of": 1}]


async def test_every_key_of_an_event_of_responses_is_missed() -> None:
    reply = await Client(FakeLLM()).post("/v1/responses", {"input": "Hi", "stream": True})
    route = operations()["post", "/v1/responses"]
    frames = reply.body.decode().split("\n\n")[:-1]
    assert len(frames) > 8
    for frame in frames:
        name, data = (line.partition(": ")[2] for line in frame.split("\n"))
        check_schema("ResponseStreamEvent", json.loads(data))
        for without in broken(json.loads(data)):
            with pytest.raises(WrongAnswerError):
                judge(route, f"event: {name}\n".encode() + event(without), "text/event-stream")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"data: [DONE]\n\ndata: [DONE]\n\n", r"follows \[DONE\]"),
        (b": keep-alive\n\n", "the last event is None"),
        (b"data: [DONE]\n\ndata: {", "within an event"),
        (b"id: 1\ndata: [DONE]\n\n", "an event is"),
        (event({"error": {"message": "x"}}), "not valid"),
    ],
)
def test_a_stream_that_is_out_of_order_is_found(text: bytes, what: str) -> None:
    with pytest.raises(WrongAnswerError, match=what):
        judge(operations()["post", "/v1/completions"], text, "text/event-stream")


async def test_where_no_route_is_errors_are_those_of_the_path_s_api(wrong_answers: WrongAnswers) -> None:
    client = Client(FakeLLM())
    for path, is_openai in (("/v1/nothing", True), ("/v1/messages", False), ("/v1/messages/nothing", False)):
        assert ("type" in (await client.get(path)).json) != is_openai
    assert not wrong_answers.take()
    for operation in (NOWHERE, NOWHERE_OF_ANTHROPIC):
        with pytest.raises(WrongAnswerError):
            judge(operation, b'{"error": {"message": "x"}, "type": "error"}', status=404)


async def test_what_an_application_answers_is_looked_at(wrong_answers: WrongAnswers) -> None:
    client = Client(FakeLLM())

    async def models() -> Response:
        return Response('{"object": "list"}', content_type="application/json")

    client.app.view_functions["models"] = models
    assert (await client.get("/v1/models")).status == 200
    (text,) = wrong_answers.take()
    assert "get /v1/models 200 application/json" in text
    assert '"data" is a required property' in text


def test_what_an_application_answers_in_a_child_is_looked_at(wrong_answers: WrongAnswers) -> None:
    program = """
        import trio
        from quart import Response
        from trioserve.server import app

        async def version():
            return Response('{"version": 1}', content_type="application/json")

        async def receive():
            await trio.sleep_forever()

        async def send(message):
            print(message["type"])

        application = app.App("trioserve", static_folder=None)
        application.get("/version")(version)
        scope = {
            "type": "http", "method": "GET", "path": "/version", "raw_path": b"/version", "headers": [],
            "query_string": b"", "scheme": "http", "http_version": "1.1", "root_path": "", "extensions": {},
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1),
        }
        trio.run(application, scope, receive, send)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert "http.response.start" in done.stdout, done.stderr
    (text,) = wrong_answers.take()
    assert '1 is not of type "string"' in text
