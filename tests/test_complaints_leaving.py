"""Complaints 1 to 8 and 27: clients that leave."""

from __future__ import annotations

import json
import random
import socket
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fake_engine import open_fake_llm
from hash_engine import HashEngine, open_hash_llm
from helpers_complaints import (
    CHAT,
    COMPLETIONS,
    FOREVER,
    GREEDY,
    QUESTION,
    RESET,
    Caller,
    channels_in_memory,
    http_request,
    levels,
    metric_of,
    num_aborted,
    num_fds,
    openai_client,
    until,
    wait_until_running,
)
from helpers_http import Client, Server, serving
from served import ServedModel, wait_for
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app

if TYPE_CHECKING:
    from pathlib import Path

CHAT_FOREVER = {**FOREVER, "messages": QUESTION}
ENDLESS: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": (CHAT, CHAT_FOREVER, 1),
    "chat, n=2": (CHAT, {**CHAT_FOREVER, "n": 2}, 2),
    "completion": (COMPLETIONS, FOREVER, 1),
    "completion, n=3": (COMPLETIONS, {**FOREVER, "n": 3}, 3),
    "two prompts": (COMPLETIONS, {**FOREVER, "prompt": ["a", "b"]}, 2),
    "beam search": (COMPLETIONS, {**FOREVER, "use_beam_search": True, "n": 2, "max_tokens": 2000}, 1),
}
"""Path, body, and how many sequences run of it."""


async def ask(server: Server, body: dict[str, Any]) -> Client:
    client = await server.connect()
    await client.send(http_request(COMPLETIONS, body))
    return client


# Complaint 1: the client closes a stream: the engine stops within one step, the running gauge returns to 0


@pytest.mark.parametrize("leaving", [Client.close, Client.reset], ids=["close", "reset"])
async def test_complaint_01_a_closed_stream_stops_the_engine_within_one_step(
    leaving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with open_hash_llm(tmp_path, monkeypatch) as engine, serving(create_app(engine.llm)) as server:
        with engine.steps_held():
            client = await ask(server, body)
            await engine.wait_begun()
            engine.runner.let_go()
            await client.read_head()
            await client.read_chunk()
            await engine.wait_begun()
            num_steps = engine.num_steps
            leaving(client)
            await engine.until(lambda: not engine.llm.num_open_requests)
            engine.runner.let_go()  # the step that runs; a further one would be held
            await engine.until(lambda: levels(engine.llm) == (0, 0, 0))
            assert engine.num_steps - num_steps == 1


@pytest.mark.parametrize("by_reset", [False, True], ids=["close", "reset"])
def test_complaint_01_the_running_gauge_returns_to_0(server: ServedModel, by_reset: bool) -> None:
    callers = [Caller(server, COMPLETIONS, {**FOREVER, "stream": True}) for _ in range(4)]
    for caller in callers:
        caller.read_until(b"data: ")
    assert server.metric("num_requests_running") == 4
    for caller in callers:
        caller.leave(by_reset=by_reset)
    server.wait_until_idle()


# Complaint 3: requests without a stream, of any kind, are aborted on disconnect too


@pytest.mark.parametrize("kind", ENDLESS)
def test_complaint_03_a_request_without_a_stream_is_aborted_too(server: ServedModel, kind: str) -> None:
    path, body, num_sequences = ENDLESS[kind]
    before = num_aborted(server)
    caller = Caller(server, path, body)
    wait_until_running(server, num_sequences)
    caller.leave()
    server.wait_until_idle()
    assert num_aborted(server) - before >= num_sequences


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/transcriptions", "/v1/audio/translations"])
def test_complaint_03_what_the_model_cannot_do_is_refused_and_starts_no_work(
    server: ServedModel, path: str
) -> None:
    before = server.metric("prompt_tokens_total")
    status, answer = server.request("POST", path, {"input": "Hello", "prompt": "Hello"})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert "generate" in answer["error"]["message"]
    assert (server.metric("prompt_tokens_total"), *levels(server)) == (before, 0, 0, 0)


# Complaint 4: n > 1: all children are freed and no map keeps an entry


async def test_complaint_04_all_children_are_freed_and_no_map_keeps_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_llm(tmp_path, monkeypatch) as fake, serving(create_app(fake.llm)) as server:
        client = await ask(server, {"prompt": "Hi", "n": 4, "stream": True, "request_id": "four"})
        await until(lambda: len(fake.client.added) >= 4)
        done, *others = fake.client.added
        assert channels_in_memory("four") == 1
        fake.client.emit(done, "a", FinishReason.STOP)
        fake.client.emit(others[0], "b")
        await client.read_head()
        client.close()
        await until(lambda: not fake.llm.num_open_requests)
        assert fake.client.aborted == [add.request_id for add in others]
        fake.client.emit(others[1], "c")  # computed before the abort arrived
        fake.client.emit_freed(*fake.client.aborted)
        await wait_all_tasks_blocked(0.01)
        assert channels_in_memory("four") == 0
        tables = {name: value for name, value in vars(fake.llm._outputs).items() if isinstance(value, dict)}
        assert tables
        assert not any(tables.values()), tables


# Complaint 5: a queued or prefilling request whose client has gone is dropped, not run


async def wait_waiting(engine: HashEngine, number: int) -> None:
    await engine.until(lambda: metric_of(engine.llm, "num_requests_waiting") == number)


async def test_complaint_05_a_queued_request_whose_client_has_gone_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        open_hash_llm(tmp_path, monkeypatch, max_num_seqs=1) as engine,
        serving(create_app(engine.llm)) as server,
    ):
        with engine.steps_held():
            first = await ask(server, {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True})
            await engine.wait_begun()
            second = await ask(server, {"prompt": [8] * 20, "max_tokens": 4})
            await engine.until(lambda: engine.llm.num_open_requests == 2)
            engine.runner.let_go()
            await engine.wait_begun()
            await wait_waiting(engine, 1)
            second.close()
            await engine.until(lambda: engine.llm.num_open_requests == 1)
        assert (await first.read_reply()).status == 200
        await engine.until(lambda: levels(engine.llm) == (0, 0, 0))
        assert metric_of(engine.llm, "prompt_tokens_total") == 3


async def test_complaint_05_a_prefill_stops_when_its_client_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        open_hash_llm(tmp_path, monkeypatch, max_num_batched_tokens=4) as engine,
        serving(create_app(engine.llm)) as server,
    ):
        with engine.steps_held():
            client = await ask(server, {"prompt": [8] * 40, "max_tokens": 4})
            await engine.wait_begun()
            engine.runner.let_go()
            await engine.wait_begun()
            client.close()
            await engine.until(lambda: not engine.llm.num_open_requests)
            engine.runner.let_go()
            await engine.until(lambda: levels(engine.llm) == (0, 0, 0))
            assert engine.num_steps == 2
        assert metric_of(engine.llm, "prompt_tokens_total") <= 8


# Complaint 6: an abort touches its own request only


def test_complaint_06_an_abort_leaves_the_neighbours_alone(server: ServedModel) -> None:
    body = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 30, "ignore_eos": True}
    _, alone = server.request("POST", COMPLETIONS, body)
    neighbour = Caller(server, COMPLETIONS, body)
    for number in range(5):
        leaver = Caller(server, COMPLETIONS, {**FOREVER, "prompt": "Once upon a", "stream": number % 3 > 0})
        if number % 3 > 0:
            leaver.read_until(b"data: ")
        leaver.leave(by_reset=number % 2 == 0)
    beside = json.loads(neighbour.read_to_end()[1])
    assert beside["choices"] == alone["choices"]
    assert beside["usage"]["completion_tokens"] == 30
    server.wait_until_idle()


# Complaint 7: after a disconnect the next request with the same prefix is right, and the blocks are back


def test_complaint_07_the_next_request_with_the_same_prefix_is_right(server: ServedModel) -> None:
    prompt = "A list of the countries of Europe and their capitals: " * 8 + "France:"
    short = {**GREEDY, "prompt": prompt, "max_tokens": 8}
    _, expected = server.request("POST", COMPLETIONS, {**short, "cache_salt": "elsewhere"})
    leaver = Caller(server, COMPLETIONS, {**FOREVER, "prompt": prompt, "stream": True, "temperature": 0})
    leaver.read_until(b"data: ")
    leaver.leave()
    server.wait_until_idle()
    hits = server.metric("prefix_cache_hits_total")
    _, again = server.request("POST", COMPLETIONS, short)
    assert again["choices"] == expected["choices"]
    assert server.metric("prefix_cache_hits_total") - hits > 50
    assert levels(server) == (0, 0, 0)


# Complaint 8: a thousand disconnects leave capacity unchanged


class Leavers:
    """So many clients that have little patience, 32 at a time."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._random = random.Random(8)
        self._numbers = iter(range(count))

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(32):
                nursery.start_soon(self._run_some)

    async def _run_some(self) -> None:
        for number in self._numbers:
            await self._run_one(number)

    async def _run_one(self, number: int) -> None:
        """A fifth leaves when the first part of a stream is there, the others whenever their time is up."""
        waits = number % 5 == 0
        kind = "chat, n=2" if waits else self._random.choice(list(ENDLESS))
        path, body, _ = ENDLESS[kind]
        data = http_request(path, {**body, "stream": waits or (number % 2 == 0 and kind != "beam search")})
        if not waits and number % 20 == 1:
            data = data[: self._random.randrange(len(data))]
        with trio.socket.socket() as sock:
            await sock.connect(("127.0.0.1", self._port))
            if self._random.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            await trio.SocketStream(sock).send_all(data)
            with trio.move_on_after(60 if waits else self._random.random() ** 2 * 0.4):
                while await sock.recv(65536) and not waits:
                    pass


async def test_complaint_08_a_thousand_disconnects_leave_capacity_unchanged(server: ServedModel) -> None:
    question = {"messages": QUESTION, **GREEDY}
    with openai_client(server) as client:
        before = client.chat.completions.create(**question)
    server.wait_until_idle()
    aborted = num_aborted(server)
    fds = [num_fds(pid) for pid in (server.process.pid, server.engine_pid)]
    await Leavers(server.port, 1000).run()
    server.wait_until_idle()
    wait_for(lambda: [num_fds(pid) for pid in (server.process.pid, server.engine_pid)] == fds)
    assert num_aborted(server) - aborted >= 2 * 200  # of those that waited; of the others, as may be
    with openai_client(server) as client:
        after = client.chat.completions.create(**question)
    assert after.choices == before.choices


# Complaint 27: the gauges are 0 without a further request; aborts are counted as such


def test_complaint_27_aborts_are_counted_and_the_gauges_are_0_by_themselves(server: ServedModel) -> None:
    aborted, freed = num_aborted(server), server.metric("abort_to_free_seconds_count")
    succeeded = server.metric("request_success_total")
    callers = [Caller(server, COMPLETIONS, {**FOREVER, "stream": number % 2 == 0}) for number in range(6)]
    wait_until_running(server, 6)
    for caller in callers:
        caller.leave()
    server.wait_until_idle()
    assert num_aborted(server) - aborted == 6
    assert server.metric("request_success_total") - succeeded == 6
    wait_for(lambda: server.metric("abort_to_free_seconds_count") - freed == 6)
