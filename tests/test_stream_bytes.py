"""Streams that the reader of the link writes, and streams that their own tasks write: the same bytes."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from trio.testing import wait_all_tasks_blocked

from helpers_complaints import CHAT, COMPLETIONS, http_request, until
from helpers_http import serving
from trioserve.link.columns import unpack_token_ids
from trioserve.outputs import FinishReason
from trioserve.server import byte_streams
from trioserve.server.app import create_app
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    import trio

    from fake_engine import FakeEngine
    from helpers_http import Client, Server
    from trioserve.link.messages import Add

NUM_STREAMS = 100
NUM_STEPS = 12
TEXT = 'plain words, "quotes" and \\ and\nlines; \u00e9\u4e2d\U0001f600 \x00 </think> xyz '.encode()
TIMES = re.compile(rb'"(created|created_at|completed_at)":\d+')
IDS = re.compile(rb"(resp|msg)_[0-9a-f]+")


def without_send_now(app: Any) -> Any:
    """`app` under a server that knows nothing but ASGI."""

    async def call(scope: Any, *args: Any) -> None:
        await app({**scope, "extensions": {}}, *args)

    return call


@attrs.frozen
class Asked:
    """One request, sent to both servers; its prompt holds its name, so that its sequences are known."""

    name: str
    path: str
    body: dict[str, Any]
    n: int

    @classmethod
    def draw(cls, rng: random.Random, number: int) -> Asked:
        name = f"p{number:03}"
        messages = [{"role": "user", "content": name}]
        some = lambda *fields: {key: value for key, value in fields if rng.random() < 0.4}  # noqa: E731
        usage = {"include_usage": rng.random() < 0.5, "continuous_usage_stats": rng.random() < 0.5}
        n = rng.choice([1, 1, 2, 3])
        common = {"stream": True, "n": n, "max_tokens": 60, "stream_options": usage}
        common |= some(("return_token_ids", True), ("stop", ["xyz"]))
        match number % 5:
            case 0 | 1:
                fields = common | {"prompt": name} | some(rng.choice([("logprobs", 2), ("echo", True)]))
                return cls(name, COMPLETIONS, fields, n)
            case 2:
                logprobs = {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.4 else {}
                return cls(name, CHAT, common | {"messages": messages} | logprobs, n)
            case 3:
                body = {"messages": messages, "max_tokens": 60, "stream": True, "model": "fake"}
                return cls(name, "/v1/messages", body, 1)
            case _:
                return cls(name, "/v1/responses", {"input": name, "stream": True}, 1)

    async def send(self, server: Server) -> Client:
        client = await server.connect()
        headers = ("connection: close", f"x-request-id: {self.name}")
        await client.send(http_request(self.path, self.body, *headers))
        return client

    def sequences(self, adds: Sequence[Add]) -> list[list[Add]]:
        """For each choice, what stands for it on the two servers."""
        own = [
            add for add in adds if self.name.encode() in bytes(list(unpack_token_ids(add.prompt_token_ids)))
        ]
        assert len(own) == 2 * self.n
        return [[own[index], own[index + self.n]] for index in range(self.n)]


class Script:
    """What the engine gives in each step: the same to both of the sequences that stand for one choice."""

    def __init__(self, rng: random.Random, choices: list[list[Add]]) -> None:
        self._rng = rng
        self._running = {index: rng.randrange(len(TEXT)) for index in range(len(choices))}
        self._choices = choices

    def step(self, *, is_last: bool) -> list[tuple[Add, Any, FinishReason | None, int | None]]:
        updates = []
        for index, position in list(self._running.items()):
            count = self._rng.choice([0, 1, 1, 1, 2, 5])
            ends = is_last or self._rng.random() < 0.05
            if not count and not ends:
                continue
            tokens = [self._token(index, TEXT[(position + step) % len(TEXT)]) for step in range(count)]
            self._running[index] += count
            reason = FinishReason.LENGTH if ends else None
            updates += [(add, tokens, reason, None) for add in self._choices[index]]
            if ends:
                del self._running[index]
        return updates

    def _token(self, index: int, token_id: int) -> SampledToken:
        wants_logprobs = self._choices[index][0].params.logprobs is not None
        row = LogprobRow([token_id, token_id, 65], [-0.5, -0.5, -1.25], [1, 1, 2])
        return SampledToken(token_id, row if wants_logprobs else None)


@pytest.mark.parametrize("seed", [0, 1])
async def test_the_bytes_do_not_depend_on_who_writes_them(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    write_now = byte_streams.write_now

    def write_some(sock: trio.socket.SocketType, data: bytes) -> int:
        return write_now(sock, data[: rng.choice([0, 1, 7, 10**9, 10**9, 10**9])])

    monkeypatch.setattr(byte_streams, "write_now", write_some)
    asked = [Asked.draw(rng, number) for number in range(NUM_STREAMS)]
    async with serving(create_app(fake.llm)) as fast, serving(without_send_now(create_app(fake.llm))) as slow:
        clients = [(await each.send(fast), await each.send(slow)) for each in asked]
        await until(lambda: len(fake.client.added) >= 2 * sum(each.n for each in asked))
        choices = [pair for each in asked for pair in each.sequences(fake.client.added)]
        script = Script(rng, choices)
        for number in range(NUM_STEPS):
            fake.client.emit_step(script.step(is_last=number == NUM_STEPS - 1))
            await wait_all_tasks_blocked(0.005)
        for each, pair in zip(asked, clients, strict=True):
            forwarded, written = [await body_of(client) for client in pair]
            assert forwarded == written, each
            assert forwarded.endswith(b"\r\n0\r\n\r\n")


async def body_of(client: Client) -> bytes:
    head, body = (await client.read_to_end()).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200"), body
    return IDS.sub(rb"\1", TIMES.sub(rb'"\1":0', body))
