"""For the tests of the Responses API: an application with a background, and an engine that waits."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from helpers_api import Answer, Exchange, FakeLLM, Reply
from trioserve.server.app import create_app
from trioserve.server.request_scope import App
from trioserve.server.responses.background import Background, open_background
from trioserve.server.responses.home import ResponsesHome, open_response_store
from trioserve.server.responses.store import ResponseStore
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trioserve.outputs import RequestOutput

PATH = "/v1/responses"


class PacedLLM(FakeLLM):
    """Gives an output each time it is let."""

    def __init__(self, script: Any = None) -> None:
        super().__init__(script)
        self._permits = trio.Semaphore(0)

    def let(self, outputs: int) -> None:
        for _ in range(outputs):
            self._permits.release()

    async def submit(self, prompt: Any, params: Any, **options: Any) -> Any:
        channel = await super().submit(prompt, params, **options)
        return _PacedChannel(channel, self._permits)

    def release(self, channel: Any) -> None:
        super().release(channel.inner)


@attrs.define
class _PacedChannel:
    inner: Any
    _permits: trio.Semaphore

    async def take(self) -> RequestOutput:
        await self._permits.acquire()
        output: RequestOutput = self.inner.take_nowait()
        return output

    async def forward(self, deliver: Callable[[RequestOutput], bool]) -> None:
        """Each output is for `take`."""


@attrs.frozen
class Event:
    """One of a stream's."""

    name: str
    data: dict[str, Any]


def read_events(body: bytes) -> list[Event]:
    events = []
    for frame in body.decode().split("\n\n"):
        if frame and not frame.startswith(":"):
            name, data = frame.split("\n")
            event = Event(name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
            assert event.name == event.data["type"]
            events.append(event)
    return events


def names(events: list[Event]) -> list[str]:
    """Without what they all begin with."""
    return [event.name.removeprefix("response.") for event in events]


@attrs.frozen
class Api:
    """The routes, as a client calls them."""

    app: App
    llm: FakeLLM
    store: ResponseStore | None
    background: Background

    def exchange(
        self, method: str, path: str, content: Any = None, *, query: str = "", key: str | None = None
    ) -> Exchange:
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        body = b"" if content is None else json.dumps(content).encode()
        return Exchange(self.app, method, path, body, headers, query=query.encode())

    async def call(self, method: str, path: str, content: Any = None, **options: Any) -> Reply:
        exchange = self.exchange(method, path, content, **options)
        await exchange.run()
        return exchange.reply

    async def create(self, key: str | None = None, **request: Any) -> Reply:
        return await self.call("POST", PATH, {"input": "Hi there"} | request, key=key)

    async def stream(self, **request: Any) -> list[Event]:
        reply = await self.create(stream=True, **request)
        assert reply.status == 200, reply.body
        return read_events(reply.body)

    async def get(self, response_id: str, query: str = "", key: str | None = None) -> Reply:
        return await self.call("GET", f"{PATH}/{response_id}", query=query, key=key)

    async def cancel(self, response_id: str, key: str | None = None) -> Reply:
        return await self.call("POST", f"{PATH}/{response_id}/cancel", key=key)

    async def delete(self, response_id: str, key: str | None = None) -> Reply:
        return await self.call("DELETE", f"{PATH}/{response_id}", key=key)

    async def items(self, response_id: str, query: str = "", key: str | None = None) -> Reply:
        return await self.call("GET", f"{PATH}/{response_id}/input_items", query=query, key=key)


@asynccontextmanager
async def serving(llm: FakeLLM | Answer | None = None, **server_args: Any) -> AsyncIterator[Api]:
    """As `trioserve serve` has it."""
    given = llm if isinstance(llm, FakeLLM) else FakeLLM(llm)
    args = ServerArgs(**server_args)
    async with (
        open_response_store(args) as store,
        open_background(args.responses_max_background) as background,
    ):
        home = ResponsesHome(store, background)
        app = create_app(given, args, responses=home)  # type: ignore[arg-type]  # it stands for an AsyncLLM
        yield Api(app, given, store, background)
