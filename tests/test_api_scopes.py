"""A request is a scope: whatever ends it ends its work in the engine."""

from __future__ import annotations

import gc
import json
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from helpers_api import Client, Exchange, FakeLLM
from trioserve.server.request_scope import ScopedRequest

if TYPE_CHECKING:
    from trioserve.server.deadlines import RequestDeadline

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
CHAT_2 = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 2})
TEXT = ("/v1/completions", {"prompt": "Hi"})
TEXTS = ("/v1/completions", {"prompt": ["Hi", "there", "you"]})
KINDS = pytest.mark.parametrize(("path", "request_fields"), [CHAT, CHAT_2, TEXT, TEXTS])


def begin(llm: FakeLLM, path: str, request: Any) -> Exchange:
    body = json.dumps(request).encode()
    return Exchange(Client(llm).app, "POST", path, body, {"content-type": "application/json"})


@KINDS
@pytest.mark.parametrize(("stream", "outputs_left"), [(False, 0), (True, 0), (True, 1)])
async def test_a_client_that_leaves_ends_its_requests(
    path: str, request_fields: dict[str, Any], stream: bool, outputs_left: int
) -> None:
    llm = FakeLLM()
    llm.outputs_left = outputs_left
    exchange = begin(llm, path, request_fields | {"stream": stream})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        assert llm.running
        assert bool(exchange.received) == (stream and outputs_left > 0)
        exchange.leave()
    assert not llm.running


@KINDS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_complete_reply_leaves_nothing(
    path: str, request_fields: dict[str, Any], stream: bool
) -> None:
    llm = FakeLLM()
    assert (await Client(llm).post(path, request_fields | {"stream": stream})).status == 200
    assert llm.calls
    assert not llm.running


async def test_prompts_of_a_list_run_at_the_same_time() -> None:
    llm = FakeLLM()
    llm.outputs_left = 0
    exchange = begin(llm, *TEXTS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        assert len(llm.running) == 3
        exchange.leave()


@KINDS
@pytest.mark.parametrize("stream", [False, True])
async def test_cancelled_anywhere_nothing_is_left(
    path: str, request_fields: dict[str, Any], stream: bool
) -> None:
    """Cancel the whole call at its first, second, ... step, until one runs through."""
    for step in range(1, 500):
        llm = FakeLLM()
        instrument = _CancelAt(step)
        exchange = begin(llm, path, request_fields | {"stream": stream})
        with instrument.scope:
            trio.lowlevel.add_instrument(instrument)
            try:
                await exchange.run()
            finally:
                trio.lowlevel.remove_instrument(instrument)
        assert not llm.running
        if not instrument.scope.cancelled_caught:
            return
    pytest.fail("the call never ran through")


@pytest.mark.parametrize("leaves", [False, True])
async def test_the_application_forgets_requests_that_have_ended(leaves: bool) -> None:
    known: list[weakref.ref[RequestDeadline]] = []

    class Known(ScopedRequest):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            known.append(weakref.ref(self.deadline))

    llm = FakeLLM()
    llm.outputs_left = 1
    exchange = begin(llm, TEXT[0], {**TEXT[1], "stream": leaves})
    exchange._app.request_class = Known
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        if leaves:
            await wait_all_tasks_blocked()
            exchange.leave()
    gc.collect()
    assert [reference() for reference in known] == [None]


class _CancelAt(trio.abc.Instrument):
    def __init__(self, step: int) -> None:
        self.scope = trio.CancelScope()
        self._left = step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self.scope.cancel()
