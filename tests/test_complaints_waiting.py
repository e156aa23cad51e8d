"""Complaints 2, 5, 11, 16 and 29 at a server with everything switched on, and one slot that is taken."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from fake_engine import open_fake_llm
from helpers_complaints import (
    CHAT,
    COMPLETIONS,
    FOREVER,
    GREEDY,
    QUESTION,
    Caller,
    http_request,
    num_aborted,
    openai_client,
    parse_events,
    text_of,
    until,
    wait_until_running,
)
from helpers_http import serving, stock_hypercorn
from served import STEADY, ServedModel, served, wait_for
from trioserve.server.app import create_app
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

KEY = "authorization: Bearer key"
EVERYTHING = {
    "dtype": STEADY,
    "max-num-seqs": "1",
    "api-key": "key",
    "allowed-origins": "https://app.example",
    "max-connections": "500",
    "max-connections-per-address": "400",
    "max-concurrent-requests": "50",
    "max-concurrent-requests-per-key": "40",
    "max-requests-per-minute-per-key": "9999",
    "max-num-queued-reqs": "20",
    "max-num-queued-tokens": "100000",
    "request-timeout": "300",
    "sse-keep-alive-interval": "0.1",
    "structured-outputs-config.compile_timeout": "1",
}
FLAGS = [part for name, value in EVERYTHING.items() for part in (f"--{name}", value)]
FLAGS += ["--log.requests", "--open-paths", "/health", "/health/ready", "/metrics"]


@pytest.fixture(scope="module")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    with served(tmp_path_factory.mktemp("server"), FLAGS) as server:
        yield server
        server.wait_until_idle()
        assert server.terminate() == 0, server.log
        assert "Traceback" not in server.log, server.log


def call(server: ServedModel, body: dict[str, Any], *, path: str = COMPLETIONS) -> Caller:
    return Caller(server, path, body, KEY, "origin: https://app.example")


@contextmanager
def slot_taken(server: ServedModel) -> Iterator[Caller]:
    """An endless stream has the only place."""
    occupant = call(server, {**FOREVER, "stream": True})
    occupant.read_until(b"data: ")
    try:
        yield occupant
    finally:
        occupant.leave()


# Complaint 2: a middleware or metrics wrapper hides the disconnect from a non-streaming handler


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_complaint_02_with_everything_switched_on_a_disconnect_aborts(
    full_server: ServedModel, path: str
) -> None:
    before = num_aborted(full_server)
    caller = call(full_server, {**FOREVER, "messages": QUESTION}, path=path)
    wait_until_running(full_server, 1)
    caller.leave()
    full_server.wait_until_idle()
    assert num_aborted(full_server) - before == 1


class Middleware:
    """As many are: reads the body, gives it to the application once more, and looks at what is sent."""

    def __init__(self, app: Any, *, hides_the_disconnect: bool) -> None:
        self._app = app
        self._hides_the_disconnect = hides_the_disconnect

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())

        async def receive_again() -> Any:
            if messages:
                return messages.pop(0)
            if self._hides_the_disconnect:
                await trio.sleep_forever()
            return await receive()

        async def send_on(message: Any) -> None:
            await send(message)

        await self._app(scope, receive_again, send_on)


@asynccontextmanager
async def our_server(app: Any) -> AsyncIterator[tuple[str, int]]:
    async with serving(app, access_log=True) as server:
        yield server.address


@pytest.mark.parametrize(
    ("serve", "hides"),
    [(our_server, False), (our_server, True), (stock_hypercorn, False)],
    ids=["ours", "ours, disconnect hidden", "stock hypercorn"],
)
async def test_complaint_02_in_a_middleware_a_disconnect_aborts(
    serve: Any, hides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ServerArgs(
        api_key=("key",), allowed_origins=("*",), request_timeout=300, max_concurrent_requests=9
    )
    async with open_fake_llm(tmp_path, monkeypatch) as fake:
        app = Middleware(create_app(fake.llm, args), hides_the_disconnect=hides)
        async with serve(app) as address:
            client = await trio.open_tcp_stream(*address)
            await client.send_all(http_request(COMPLETIONS, {"prompt": "Hi"}, KEY))
            await until(lambda: fake.client.added)
            await client.aclose()
            await until(lambda: not fake.llm.num_open_requests)
        assert fake.client.aborted == [fake.client.added[0].request_id]


# Complaint 5: a queued request whose client has gone is dropped, not run


def test_complaint_05_a_queued_request_leaves_the_queue_with_its_client(full_server: ServedModel) -> None:
    with slot_taken(full_server):
        before = full_server.metric("prompt_tokens_total")
        queued = [call(full_server, {**FOREVER, "stream": number % 2 == 0}) for number in range(4)]
        wait_for(lambda: full_server.metric("num_requests_waiting") == 4)
        for caller in queued:
            caller.leave()
        wait_for(lambda: full_server.metric("num_requests_waiting") == 0)
        assert full_server.metric("num_requests_running") == 1
    full_server.wait_until_idle()
    assert full_server.metric("prompt_tokens_total") == before


# Complaint 11: a health probe costs no slot, and stays right under a long prefill


def test_complaint_11_a_probe_costs_no_slot_and_is_right_in_a_long_prefill(full_server: ServedModel) -> None:
    with slot_taken(full_server):
        for path in ("/health", "/health/ready"):
            assert full_server.request("GET", path)[0] == 200
        assert full_server.metric("num_requests_running") == 1
    full_server.wait_until_idle()
    prefilling = call(full_server, {**FOREVER, "prompt": "word " * 6000, "max_tokens": 10})
    wait_until_running(full_server, 1)
    for path in ("/health", "/health/ready"):
        assert full_server.request("GET", path)[0] == 200
    assert not prefilling.received
    prefilling.leave()
    full_server.wait_until_idle()


# Complaint 16: a pathological grammar cannot hang the engine


def test_complaint_16_a_grammar_that_takes_minutes_is_given_up(full_server: ServedModel) -> None:
    schema = {"type": "integer", "multipleOf": 10000019}
    form = {"type": "json_schema", "json_schema": {"name": "catastrophe", "schema": schema}}
    with slot_taken(full_server):
        num_tokens = full_server.metric("generation_tokens_total")
        body = {**GREEDY, "messages": QUESTION, "response_format": form}
        status, text = call(full_server, body, path=CHAT).read_to_end()
        assert status == 400
        error = json.loads(text)["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
        assert full_server.metric("generation_tokens_total") > num_tokens, "the neighbour went on"


# Complaint 29: in a long queue headers go out before the first token, with comments; no chunk is lost


def test_complaint_29_a_stream_that_waits_gets_headers_and_comments_and_all_chunks(
    full_server: ServedModel,
) -> None:
    body = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 8}
    status, text = call(full_server, body).read_to_end()
    assert status == 200
    expected = json.loads(text)["choices"][0]["text"]
    with slot_taken(full_server):
        waiting = call(full_server, {**body, "stream": True})
        waiting.read_until(b": keep-alive")
        assert waiting.received.startswith(b"HTTP/1.1 200")
        assert b"data: " not in waiting.received
    events = parse_events(waiting.read_to_end()[1])
    assert events[0] == ": keep-alive"
    assert events[-1] == "[DONE]"
    assert text_of(events) == expected


def test_complaint_29_openais_client_waits_without_losing_a_chunk(full_server: ServedModel) -> None:
    question: dict[str, Any] = {**GREEDY, "messages": QUESTION}
    with openai_client(full_server, "key") as client:
        expected = client.chat.completions.create(**question).choices[0].message.content
        occupant = call(full_server, {**FOREVER, "max_tokens": 15})
        wait_until_running(full_server, 1)
        with client.chat.completions.create(stream=True, **question) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == expected
        assert occupant.read_to_end()[0] == 200
