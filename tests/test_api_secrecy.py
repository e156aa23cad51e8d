"""Errors tell what is wrong with a request and nothing of the server; each has the id of its request."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from fake_engine import open_fake_llm
from helpers_api import Answer, Client, Exchange, FakeLLM, Reply
from trioserve.errors import (
    ClosedError,
    EngineDeadError,
    EngineGenerateError,
    EngineRestartingError,
    OverloadedError,
)
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from pathlib import Path

TEXT_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
KEY = "sk-the-right-one"
WRONG_KEY = "sk-a-wrong-one"
INSIDES = "open('/models/small/x.bin') failed at <trioserve.core.Engine object at 0x7f3a5c0d1e20>"
_SPILLED = re.compile(
    r"0x[0-9a-f]{4,}|<class|<function| object at |Traceback|\.py\b|trioserve[._]|/", re.IGNORECASE
)


def assert_discreet(reply: Reply, path: str, *more: str) -> None:
    """Nothing of the server's in the whole reply; the path that the client asked for is the client's own."""
    headers = {name: value for name, value in reply.headers.items() if name != "content-type"}
    text = (
        f"{headers} {reply.body.decode()}".replace(path, "")
        .replace("application/json", "")
        .replace("text/plain", "")
    )
    assert not _SPILLED.search(text), text
    for secret in (KEY, WRONG_KEY, *more):
        assert secret not in text


@attrs.frozen(kw_only=True)
class Case:
    """A request that fails."""

    status: int
    path: str = TEXT_PATH
    method: str = "POST"
    content: Any = attrs.field(factory=lambda: {"prompt": "Hi"})
    """None: the body never comes. Bytes are sent as they are."""
    key: str = KEY
    content_type: str = "application/json"
    llm: FakeLLM = attrs.field(factory=FakeLLM)
    args: dict[str, Any] = attrs.field(factory=dict)

    async def run(self, **headers: str) -> Reply:
        app = create_app(self.llm, ServerArgs(api_key=(KEY,), **self.args))  # type: ignore[arg-type]  # a fake
        content = self.content
        body = content if isinstance(content, bytes | None) else json.dumps(content).encode()
        given = {"authorization": f"Bearer {self.key}", "content-type": self.content_type, **headers}
        exchange = Exchange(app, self.method, self.path, body, given)
        await exchange.run()
        return exchange.reply


def failing(error: Exception) -> FakeLLM:
    return FakeLLM(Answer(error=error))


def full(error: OverloadedError) -> FakeLLM:
    llm = FakeLLM()
    llm.no_room = error
    return llm


def ill(error: Exception) -> FakeLLM:
    async def fail() -> None:
        raise error

    llm = FakeLLM()
    llm.health = fail
    return llm


CASES = {
    "no JSON": Case(status=400, content=b"{'a'"),
    "a list": Case(status=400, content=[]),
    "no prompt": Case(status=400, content={}),
    "types": Case(status=400, content={"prompt": {"a": []}, "n": "x", "stop": [[]], "seed": 1e300}),
    "ranges": Case(status=400, content={"prompt": "Hi", "temperature": 9, "top_p": -1, "logprobs": 99}),
    "grammar": Case(status=400, content={"prompt": "Hi", "structured_outputs": {"json": "{", "nothing": 1}}),
    "schema": Case(status=400, content={"prompt": "Hi", "response_format": {"type": "json_schema"}}),
    "too long": Case(status=400, content={"prompt": "word " * 500}),
    "too deep": Case(status=400, content=b"[" * 10_000),
    "parts": Case(
        status=400,
        path=CHAT_PATH,
        content={"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ),
    "form": Case(status=400, content_type="text/plain"),
    "wrong key": Case(status=401, key=WRONG_KEY),
    "wrong path, no key": Case(status=401, key="", path="/v1/nothing"),
    "wrong path": Case(status=404, path="/v1/nothing"),
    "model": Case(status=404, content={"prompt": "Hi", "model": "another"}),
    "method": Case(status=405, method="DELETE"),
    "slow": Case(status=408, content=None, args={"body_timeout": 1}),
    "large": Case(status=413, content={"prompt": "x" * 1000}, args={"max_body_size": 100}),
    "generation": Case(status=500, llm=failing(EngineGenerateError(INSIDES))),
    "ended": Case(status=500, llm=FakeLLM(Answer(reason=FinishReason.ERROR))),
    "death": Case(status=500, llm=failing(EngineDeadError(INSIDES))),
    "bug": Case(status=500, llm=failing(RuntimeError(INSIDES))),
    "file": Case(status=500, llm=failing(FileNotFoundError(2, "No such file", "/models/small/x"))),
    "key error": Case(status=500, llm=failing(KeyError("/models/small"))),
    "value error": Case(status=500, llm=failing(ValueError(INSIDES))),
    "aborted": Case(status=503, llm=FakeLLM(Answer(reason=FinishReason.ABORT))),
    "closed": Case(status=503, llm=failing(ClosedError(INSIDES))),
    "full": Case(status=503, llm=full(OverloadedError("12 wait already."))),
    "restarting": Case(status=503, llm=full(EngineRestartingError(INSIDES))),
    "not ready": Case(status=503, method="GET", path="/health/ready", llm=ill(EngineDeadError(INSIDES))),
    "ill": Case(status=503, method="GET", path="/health", llm=ill(EngineDeadError(INSIDES))),
    "deadline": Case(status=504, llm=FakeLLM(Answer(reason=FinishReason.DEADLINE))),
}


@pytest.mark.parametrize("name", CASES)
async def test_an_error_says_nothing_of_the_servers_insides(
    name: str, autojump_clock: trio.testing.MockClock
) -> None:
    case = CASES[name]
    reply = await case.run()
    assert reply.status == case.status
    assert_discreet(reply, case.path)


@pytest.mark.parametrize("name", CASES)
async def test_an_error_has_the_requests_id(name: str, autojump_clock: trio.testing.MockClock) -> None:
    case = CASES[name]
    assert (await case.run(**{"x-request-id": "of-the-client"})).headers["x-request-id"] == "of-the-client"
    made_up = [(await case.run()).headers["x-request-id"] for _ in range(2)]
    assert len(set(made_up)) == 2


async def test_too_many_requests_are_told_with_an_id_too() -> None:
    client = Client(FakeLLM(), ServerArgs(max_requests_per_minute_per_key=1))
    for status in (200, 429):
        reply = await client.post(TEXT_PATH, {"prompt": "Hi"}, x_request_id="mine")
        assert (reply.status, reply.headers["x-request-id"]) == (status, "mine")
    assert_discreet(reply, TEXT_PATH, "127.0.0.1")


@pytest.mark.parametrize("path", [TEXT_PATH, CHAT_PATH])
@pytest.mark.parametrize(
    "error", [EngineDeadError(INSIDES), EngineGenerateError(INSIDES), RuntimeError(INSIDES), OSError(INSIDES)]
)
async def test_an_error_within_a_stream(path: str, error: Exception) -> None:
    content = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    reply = await Client(failing(error)).post(path, content, x_request_id="mine")
    assert (reply.status, reply.headers["x-request-id"]) == (200, "mine")
    (event,) = [event for event in reply.events if "error" in event]
    assert not _SPILLED.search(json.dumps(event))


@pytest.mark.parametrize("given", ["model", "path", "content_type"])
async def test_what_is_repeated_to_the_client_is_short(given: str) -> None:
    long = "x" * 50_000
    cases = {
        "model": Case(status=404, content={"prompt": "Hi", "model": long}),
        "path": Case(status=404, path=f"/{long}"),
        "content_type": Case(status=400, content_type=long),
    }
    reply = await cases[given].run()
    assert reply.status == cases[given].status
    assert len(reply.error["message"]) < 300


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] + 3 }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ messages.append }}{{ nothing.at.all }}",
        "{{ 1 // 0 }}",
        "{{ cycler | tojson }}",
        "{{ messages[0].tool_calls | tojson(indent=1) }}{{ nothing.at.all }}",
        "{{ raise_exception('Roles must alternate.') }}",
        "{% for x in range(10 ** 9) %}{{ x }}{% endfor %}",
    ],
)
async def test_a_template_that_fails(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("byte_tokenizer.CHAT_TEMPLATE", template)
    arguments = '{"a": ' + "[" * 400 + "]" * 400 + "}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    async with open_fake_llm(tmp_path, monkeypatch) as fake:
        for order in (messages, messages[::-1]):
            body = json.dumps({"messages": order}).encode()
            exchange = Exchange(
                create_app(fake.llm), "POST", CHAT_PATH, body, {"content-type": "application/json"}
            )
            with trio.fail_after(20):
                await exchange.run()
            assert exchange.reply.status == 400
            assert_discreet(exchange.reply, CHAT_PATH, str(tmp_path))
