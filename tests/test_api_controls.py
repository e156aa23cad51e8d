"""The routes that steer the engine, which need a flag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers_api import Client, Exchange, Reply
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from fake_engine import FakeEngine

STEERING = ("/reset_prefix_cache", "/pause", "/resume", "/sleep", "/wake_up")
ASKING = ("/is_paused", "/is_sleeping")


async def send(fake: FakeEngine, target: str, **args: Any) -> Reply:
    """A POST, or a GET of what only asks, with a query."""
    path, _, query = target.partition("?")
    server_args = ServerArgs(**{"enable_control_routes": True, **args})
    app = Client(fake.llm, server_args).app  # type: ignore[arg-type]  # it knows FakeLLM only
    method = "GET" if path in ASKING else "POST"
    exchange = Exchange(app, method, path, b"", {}, query=query.encode())
    await exchange.run()
    return exchange.reply


@pytest.mark.parametrize(
    ("target", "call", "answer"),
    [
        ("/reset_prefix_cache", ("reset_prefix_cache", False), {"reset": True}),
        ("/reset_prefix_cache?reset_running_requests=true", ("reset_prefix_cache", True), {"reset": True}),
        ("/pause", ("pause", "abort", True), {"status": "paused"}),
        ("/pause?mode=keep&clear_cache=false", ("pause", "keep", False), {"status": "paused"}),
        ("/resume", ("resume",), {"status": "resumed"}),
        ("/is_paused", ("is_paused",), {"is_paused": True}),
        ("/sleep", ("sleep", 1, "abort"), {"status": "sleeping"}),
        ("/sleep?level=2&mode=wait", ("sleep", 2, "wait"), {"status": "sleeping"}),
        ("/wake_up", ("wake_up", None), {"status": "awake"}),
        ("/wake_up?tags=weights&tags=kv_cache", ("wake_up", ["weights", "kv_cache"]), {"status": "awake"}),
        ("/is_sleeping", ("is_sleeping",), {"is_sleeping": True}),
    ],
)
async def test_what_is_told_to_the_engine(
    fake: FakeEngine, target: str, call: tuple[Any, ...], answer: dict[str, Any]
) -> None:
    reply = await send(fake, target)
    assert (reply.status, reply.json) == (200, answer)
    assert fake.client.calls[-1] == call


@pytest.mark.parametrize(
    ("target", "param"),
    [
        ("/pause?mode=now", "mode"),
        ("/pause?mod=keep", "mod"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=x", "level"),
        ("/wake_up?tags=all", "tags"),
        ("/resume?mode=keep", "mode"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests"),
    ],
)
async def test_a_wrong_parameter_does_nothing(fake: FakeEngine, target: str, param: str) -> None:
    before = list(fake.client.calls)
    reply = await send(fake, target)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert fake.client.calls == before


@pytest.mark.parametrize("path", [*STEERING, *ASKING])
async def test_without_the_flag_there_are_none(fake: FakeEngine, path: str) -> None:
    assert (await send(fake, path, enable_control_routes=False)).status == 404
    assert not fake.client.calls


@pytest.mark.parametrize("path", [*STEERING, *ASKING])
async def test_they_need_a_key(fake: FakeEngine, path: str) -> None:
    assert (await send(fake, path, api_key=("k",))).status == 401
    assert not fake.client.calls
