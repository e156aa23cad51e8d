"""The kinds of requests over HTTP, and a server whose requests can be cancelled one by one."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from cancel_everywhere import ABORTED, LeakError, Target
from cancel_kinds import Kind
from cancel_worlds import BEAMS, NUM_TOKENS, PROMPT, EngineWorld
from helpers_api import Exchange
from helpers_http import Client, post
from trioserve.server.app import create_app
from trioserve.server.http import HttpLimits, serve_http
from trioserve.server.responses.background import open_background
from trioserve.server.responses.home import ResponsesHome
from trioserve.server.responses.memory_store import MemoryStore
from trioserve.server.responses.store import StoreLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trioserve.async_llm import AsyncLLM
    from trioserve.server.responses.background import Background

__all__ = ["BACKGROUND", "HTTP", "WITHOUT_SEED", "HttpKind", "Site", "open_site"]


@attrs.frozen
class HttpKind:
    """A kind of request over HTTP: where it goes, and what its body says beside the sampling."""

    name: str
    path: str
    body: dict[str, Any]
    expected: Callable[[Any], Awaitable[object]]

    def request(self) -> bytes:
        headers = ("content-type: application/json", "connection: close")
        return post(self.path, json.dumps(self.body).encode(), *headers)

    def result_in(self, response: bytes) -> object:
        """The texts by choice; None if the response is not complete, or no success."""
        return _texts_in(response)


_CHAT_PATH, _COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
_RESPONSES_PATH, _MESSAGES_PATH = "/v1/responses", "/v1/messages"
_MESSAGES = [{"role": "user", "content": "Hi"}]
_CHAT = {"messages": _MESSAGES}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_RESPONSE = {"input": "Hi", "max_output_tokens": NUM_TOKENS, "seed": 0, "top_k": 1, "ignore_eos": True}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
_SAMPLING = {"max_tokens": NUM_TOKENS, "seed": 0, "top_k": 1, "ignore_eos": True}
_BEAM_SEARCH = {
    "use_beam_search": True,
    "n": BEAMS.beam_width,
    "max_tokens": BEAMS.max_tokens,
    "ignore_eos": True,
}


async def _chat_texts(world: EngineWorld, n: int = 1) -> object:
    tokens = await _chat_tokens(world)
    return {index: world.decode(await world.answer(tokens, seed=index)) for index in range(n)}


async def _chat_tokens(world: EngineWorld) -> list[int]:
    prompt = await world.llm.render_chat(_MESSAGES)
    return world.encode(prompt.text, special=False)


async def _structured_chat_text(world: EngineWorld) -> object:
    return {0: world.decode(await world.answer_in_form(await _chat_tokens(world), _SCHEMA))}


async def _texts_of(prompts: Sequence[str], world: EngineWorld) -> object:
    return {index: await world.text(prompt) for index, prompt in enumerate(prompts)}


async def _texts_of_beams(world: EngineWorld) -> object:
    return dict(enumerate(await world.beams(world.encode(PROMPT))))


def _completion(name: str, *prompts: str, **fields: Any) -> HttpKind:
    body = {"prompt": prompts if len(prompts) > 1 else prompts[0], **_SAMPLING, **fields}
    return HttpKind(f"completion{name}", _COMPLETION_PATH, body, partial(_texts_of, prompts))


def _chat(name: str, n: int = 1, **fields: Any) -> HttpKind:
    body = {**_CHAT, **_SAMPLING, "n": n, **fields}
    return HttpKind(f"chat{name}", _CHAT_PATH, body, partial(_chat_texts, n=n))


HTTP = [
    _chat(""),
    _chat(", stream", stream=True),
    _chat(", stream, n=3", n=3, stream=True),
    attrs.evolve(_chat(", structured", response_format=_FORMAT), expected=_structured_chat_text),
    _completion("", PROMPT),
    _completion(", stream", PROMPT, stream=True),
    _completion(", stream, logprobs", PROMPT, stream=True, logprobs=2),
    _completion(", three prompts", "a", "b", "c"),
    _completion(", stream, three prompts", "a", "b", "c", stream=True),
    HttpKind(
        "completion, beam search", _COMPLETION_PATH, {"prompt": PROMPT, **_BEAM_SEARCH}, _texts_of_beams
    ),
    HttpKind("responses", _RESPONSES_PATH, _RESPONSE, _chat_texts),
    HttpKind("responses, stream", _RESPONSES_PATH, {**_RESPONSE, "stream": True}, _chat_texts),
]

_MESSAGE = {**_CHAT, "max_tokens": NUM_TOKENS, "top_k": 1, "stream": True}
WITHOUT_SEED = [HttpKind("messages, stream", _MESSAGES_PATH, _MESSAGE, _chat_texts)]
"""For engines in which the seed of a request that names none does not matter."""


class Site:
    """The API on a port. A request's scope is around the application's call, in the task that serves it."""

    def __init__(self, app: Any, address: Any) -> None:
        self._app = app
        self._address = address
        self._target = Target()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._target.here():
            await self._app(scope, receive, send)

    async def ask(self, kind: HttpKind, target: Target) -> object:
        """What `kind` sees in the response; None if there is none."""
        self._target = target
        client = Client(trio.SocketStream(trio.socket.socket()))
        target.leave = client.close
        try:
            await client.stream.socket.connect(self._address)
            await client.send(kind.request())
            result = kind.result_in(await client.read_to_end())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            result = None
        finally:
            client.close()
        await target.ended.wait()  # a server notices a little later that its client has left
        return result


@asynccontextmanager
async def open_site(llm: AsyncLLM) -> AsyncIterator[Site]:
    listener = socket.create_server(("127.0.0.1", 0))
    site = Site(create_app(llm), listener.getsockname())
    serve = partial(serve_http, site, [listener], HttpLimits(), shutdown=trio.Event(), access_log=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        yield site
        nursery.cancel_scope.cancel()


# A response that no client waits for: its task, and the nursery of such tasks, are the request's.


async def _ask_in_background(world: EngineWorld, target: Target) -> object:
    store = MemoryStore(StoreLimits(max_responses=10, max_bytes=2**20, ttl=3600))
    with target.here():
        async with open_background(1) as background:
            target.abort = partial(_cancel_runs, background)
            app = create_app(world.llm, responses=ResponsesHome(store, background))
            body = json.dumps({**_RESPONSE, "background": True}).encode()
            await Exchange(app, "POST", _RESPONSES_PATH, body, {"content-type": "application/json"}).run()
    return _result_in(store)


def _cancel_runs(background: Background) -> None:
    for run in background._runs.values():
        run.cancel()


def _result_in(store: MemoryStore) -> object:
    """The texts that are kept. Nothing may be kept as if it went on."""
    kept = [stored for stored, _ in store._kept.values()]
    if any(stored.is_open for stored in kept):
        raise LeakError("a response that is never made is kept as one that is under way")
    responses = [json.loads(stored.response) for stored in kept]
    if not responses:
        return None
    if responses[0]["status"] == "cancelled":
        return ABORTED
    return _texts_in_output(responses[0])


BACKGROUND = Kind("HTTP: responses, background", _ask_in_background, _chat_texts)


def _texts_in(response: bytes) -> object:
    head, _, body = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return None
    if b"text/event-stream" not in head:
        answer = json.loads(body)
        if "output" in answer:
            return _texts_in_output(answer)
        return {choice["index"]: _text_in(choice) for choice in answer["choices"]}
    events = re.findall(rb"^data: (.*)$", body, re.MULTILINE)
    if b"\nevent: " in body:
        return _texts_in_named(list(map(json.loads, events)))
    if not events or events[-1].strip() != b"[DONE]":
        return None
    texts: dict[int, str] = {}
    for choice in (choice for event in events[:-1] for choice in json.loads(event)["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + _text_in(choice)
    return texts


def _texts_in_output(response: dict[str, Any]) -> object:
    (message,) = response["output"]
    return {0: message["content"][0]["text"]}


def _texts_in_named(events: list[dict[str, Any]]) -> object:
    """Of a response or of a message of Anthropic's."""
    last = events[-1]
    if last["type"] == "response.incomplete":
        return _texts_in_output(last["response"])
    if last["type"] != "message_stop":
        return None
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    return {0: "".join(deltas)}


def _text_in(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta"))["content"] or ""
