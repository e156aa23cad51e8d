"""Bodies made to hurt: each gets a right answer or a 400 that says what is wrong, never a 500."""

from __future__ import annotations

import gc
import gzip
import json
import threading
from typing import Any

import pytest
import trio

import trioserve.server.service
from helpers_api import Client, Exchange, FakeLLM
from trioserve.errors import InvalidConfigError, InvalidRequestError
from trioserve.server.protocol.json_depth import check_json_depth
from trioserve.server.protocol.readers import MAX_MESSAGES
from trioserve.server.protocol.reading import read_object
from trioserve.server.request_scope import ScopedRequest as Request
from trioserve.server_args import ServerArgs

JSON = {"content-type": "application/json"}
PATHS = ["/v1/completions", "/v1/chat/completions"]
MESSAGES = '"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"'


def nested(levels: int) -> bytes:
    """An object whose field `prediction` makes it so many levels deep."""
    inner = "[" * (levels - 1) + "]" * (levels - 1)
    return f'{{{MESSAGES}, "prediction": {inner}}}'.encode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("limit", "levels"), [(128, 128), (128, 129), (128, 500), (128, 100_000), (3, 3), (3, 4)]
)
async def test_depth(path: str, limit: int, levels: int) -> None:
    reply = await Client(FakeLLM(), ServerArgs(max_json_depth=limit)).post(path, nested(levels))
    if levels <= limit:
        assert reply.status == 200
    else:
        assert reply.status == 400
        assert f"at most {limit} levels" in reply.error["message"]


async def test_a_limit_beyond_what_can_be_read_is_no_error_of_the_server() -> None:
    reply = await Client(FakeLLM(), ServerArgs(max_json_depth=10**6)).post(PATHS[0], nested(100_000))
    assert reply.status == 400
    assert "nested too deeply" in reply.error["message"]


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"a": [{"b": [[]]}]},
        {"a": "[[[[[[", "b": ["{{{{{{"]},
        {'"[': ['"', "\\", '\\"[[[[', "\\\\"], "]": {}},
        ["\\\\\\\"[[[[[", "\\", [["é[[[[", "\u2028{{{{"]]],
        [[1, 2], [3], {"a": None}, [[[4]]]] * 50,
        {"code": 'x["a"] = {"b": [1]}\n' * 30, "deep": [[[[]]]]},
        'only a [ text ["',
    ],
)  # fmt: skip
@pytest.mark.parametrize("indent", [None, 1])
def test_depth_is_told_from_the_bytes(value: Any, indent: int | None) -> None:
    depth = depth_of(value)
    for ascii_only in (True, False):
        body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
        check_json_depth(body, max(depth, 1))
        if depth > 1:
            with pytest.raises(InvalidRequestError, match=f"at most {depth - 1} levels"):
                check_json_depth(body, depth - 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "extra",
    [
        '"seed": NaN', '"temperature": Infinity', '"temperature": -Infinity', '"temperature": 1e400',
        '"stop": "\\ud800"', '"stop": "\\udc00x"', '"seed": 1' + "0" * 5000, '"seed": 1' + "0" * 400,
        '"temperature": 1' + "0" * 400, '"max_tokens": 1e308', '"n": 0x10', '"n": 01', '"stop": "\x00"',
        '"user": "\xff"', '"n": 1,', "n: 1", '"n": 1} {"n": 2', '"max_tokens": -1' + "0" * 400,
        '"logit_bias": {"1' + "0" * 400 + '": 1}', '"stop": ' + "[" * 120 + "]" * 120,
        '"stop": {"a": ' * 60 + "1" + "}" * 60, '"stream": "\\ud83d"',
    ],
)  # fmt: skip
async def test_what_json_or_python_cannot_hold(path: str, extra: str) -> None:
    body = f"{{{MESSAGES}, {extra}}}".encode("latin-1")
    reply = await Client(FakeLLM()).post(path, body)
    assert reply.status == 400
    assert len(reply.error["message"]) < 1000


@pytest.mark.parametrize(
    "extra",
    ['"n": 7, "n": 1', '"user": "\\ud83d\\ude00"', '"seed": 5.0', '"user": "\\u0000"', '"metadata": {"": 1}'],
)
async def test_what_looks_odd_and_is_right(extra: str) -> None:
    """Of two equal keys the last one counts, as for most readers of JSON."""
    reply = await Client(FakeLLM()).post(PATHS[0], f"{{{MESSAGES}, {extra}}}".encode())
    assert reply.status == 200
    assert len(reply.json["choices"]) == 1


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"3", b'"{}"', b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b"{"]
)
async def test_what_is_no_object(body: bytes) -> None:
    reply = await Client(FakeLLM()).post(PATHS[0], body)
    assert reply.status == 400
    assert "The body" in reply.error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate, identity", "x" * 1000])
async def test_an_encoded_body_is_refused_by_name(path: str, encoding: str) -> None:
    body = gzip.compress(f"{{{MESSAGES}}}".encode())
    reply = await Client(FakeLLM()).post(path, body, content_encoding=encoding)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_content_encoding")
    assert "Content-Encoding" in reply.error["message"]
    assert len(reply.error["message"]) < 200


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
async def test_a_plain_body_may_be_called_so(encoding: str) -> None:
    body = f"{{{MESSAGES}}}".encode()
    assert (await Client(FakeLLM()).post(PATHS[0], body, content_encoding=encoding)).status == 200


async def test_a_large_body_is_read_while_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def check(body: bytes, limit: int) -> None:
        assert len(body) < 1000 or go_on.wait(3)

    monkeypatch.setattr(trioserve.server.service, "check_json_depth", check)
    client = Client(FakeLLM())
    body = json.dumps({"prompt": "Hi", "user": "x" * 2**20}).encode()
    large = Exchange(client.app, "POST", PATHS[0], body, JSON)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(large.run)
        await trio.testing.wait_all_tasks_blocked()
        assert (await client.post(PATHS[0], {"prompt": "Hi"})).status == 200
        assert not large._sent
        go_on.set()
    assert large.reply.status == 200


@pytest.mark.parametrize(("end", "status"), [("}", 200), ("", 400)])
async def test_garbage_is_collected_after_a_large_body(end: str, status: int) -> None:
    body = f'{{"prompt": "Hi", "user": "{"x" * 2**21}"{end}'.encode()
    assert (await Client(FakeLLM()).post(PATHS[0], body)).status == status
    assert gc.isenabled()


async def test_a_body_is_not_kept_while_its_request_runs() -> None:
    llm = FakeLLM()
    llm.outputs_left = 0
    bodies = []

    class Seen(Request):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            bodies.append(self.body)

    client = Client(llm)
    client.app.request_class = Seen
    exchange = Exchange(client.app, "POST", PATHS[0], b'{"prompt": "Hi"}', JSON)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.testing.wait_all_tasks_blocked()
        assert llm.running
        assert [len(body._data) for body in bodies] == [0]
        exchange.leave()


@pytest.mark.parametrize(
    "messages",
    [
        [None] * (MAX_MESSAGES + 1),
        [{"role": "user", "content": [None] * MAX_MESSAGES}],
        [{"role": "assistant", "tool_calls": [None] * MAX_MESSAGES}],
    ],
)
async def test_too_many_messages_are_not_looked_at(messages: list[Any]) -> None:
    reply = await Client(FakeLLM()).post(PATHS[1], {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert reply.error["message"] == (
        f"messages must hold at most {MAX_MESSAGES} messages, parts of them and tool calls in all, "
        f"got {MAX_MESSAGES + 1}."
    )


def read(body: bytes) -> None:
    check_json_depth(body, 128)
    read_object(body)


@pytest.mark.parametrize("piece", [b"[", b"{", b"[],", b'{"a":', b'"",', b"]"])
def test_sixteen_mib_of_brackets(piece: bytes) -> None:
    body = piece * (2**24 // len(piece))
    with pytest.raises(InvalidRequestError):
        read(body)


@pytest.mark.parametrize("path", PATHS)
async def test_arguments_of_a_call_are_json_within_json(path: str) -> None:
    """It is a text for us, but an object for chat templates."""
    arguments = '{"a": ' + "[" * 500 + "]" * 500 + "}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    reply = await Client(FakeLLM()).post(path, {"prompt": "Hi", "messages": messages})
    assert reply.status in {200, 400}


@pytest.mark.parametrize("value", [0, -1, "nan", True])
def test_a_body_needs_some_time(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match="body_timeout must be a number of seconds > 0"):
        ServerArgs(body_timeout=value)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_does_not_come(path: str, autojump_clock: trio.testing.MockClock) -> None:
    client = Client(FakeLLM(), ServerArgs(body_timeout=7))
    exchange = Exchange(client.app, "POST", path, None, JSON)
    started = trio.current_time()
    await exchange.run()
    assert trio.current_time() - started == pytest.approx(7)
    assert (exchange.reply.status, exchange.reply.error["code"]) == (408, "request_timeout")
