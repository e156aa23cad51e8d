"""Complaints 9 to 15: engines that die or are stuck, servers that die, start and stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import openai
import pytest

from helpers_complaints import COMPLETIONS, FOREVER, GREEDY, Caller, http_request, num_fds, parse_events
from helpers_streams import StreamInThread
from served import ServedModel, children_of, is_running, served, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

RESTARTING = [
    *("--engine-restart", "on-failure"),
    *("--engine-restart-backoff", "0.2"),
    *("--step-timeout", "6"),
    *("--health-timeout", "0.5"),
]


@pytest.fixture(scope="module")
def restarting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """A server whose engine is replaced when it dies; each test leaves it ready."""
    with served(tmp_path_factory.mktemp("server"), RESTARTING) as server:
        yield server
        assert server.terminate() == 0, server.log
        assert "Traceback" not in server.log, server.log


def status_of(server: ServedModel, path: str) -> int:
    return server.request("GET", path)[0]


def wait_ready(server: ServedModel) -> None:
    wait_for(lambda: status_of(server, "/health/ready") == 200, 60)


# Complaint 9: kill -9 of the engine


@attrs.define
class Death:
    """What was seen when an engine was killed that is not restarted."""

    health: int = 0
    streams: list[Exception | None] = attrs.Factory(list)
    whole: tuple[int, str] = (0, "")
    exit_code: int | None = None


@pytest.fixture(scope="module")
def death(tmp_path_factory: pytest.TempPathFactory) -> Death:
    seen = Death()
    with served(tmp_path_factory.mktemp("server")) as server:
        streams = [StreamInThread(server.url) for _ in range(2)]
        whole = Caller(server, COMPLETIONS, FOREVER)
        wait_for(lambda: server.metric("num_requests_running") == 3)
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_for(lambda: status_of(server, "/health") != 200)
        seen.health = status_of(server, "/health")
        for stream in streams:
            stream.join()
        seen.streams = [stream.error for stream in streams]
        seen.whole = whole.read_to_end()
        seen.exit_code = server.process.wait(30)
    return seen


def test_complaint_09_a_killed_engine_fails_what_runs_and_health(death: Death) -> None:
    assert death.health == 503
    assert [type(error) for error in death.streams] == [openai.APIError] * 2
    status, text = death.whole
    assert (status, json.loads(text)["error"]["code"]) == (500, "engine_dead")


def test_complaint_09_a_killed_engine_is_restarted_if_that_is_configured(restarting: ServedModel) -> None:
    stream = StreamInThread(restarting.url)
    engine = restarting.engine_pid
    os.kill(engine, signal.SIGKILL)
    stream.join()
    assert isinstance(stream.error, openai.APIError)
    assert [status_of(restarting, f"/health{path}") for path in ("", "/ready", "/live")] == [503, 503, 200]
    wait_ready(restarting)
    assert restarting.engine_pid != engine
    assert restarting.request("POST", COMPLETIONS, {**GREEDY, "prompt": "Hello"})[0] == 200


# Complaint 10: an engine that is alive but stuck


def test_complaint_10_a_stopped_engine_is_not_ready_and_then_it_is_again(restarting: ServedModel) -> None:
    wait_ready(restarting)
    engine = restarting.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        status, answer = restarting.request("GET", "/health/ready")
        live = status_of(restarting, "/health/live")
    finally:
        os.kill(engine, signal.SIGCONT)
    assert (status, answer["error"]["code"], live) == (503, "not_answering", 200)
    wait_ready(restarting)
    assert restarting.engine_pid == engine


def test_complaint_10_an_engine_that_stays_stuck_counts_as_dead(restarting: ServedModel) -> None:
    wait_ready(restarting)
    engine = restarting.engine_pid
    stream = StreamInThread(restarting.url)
    os.kill(engine, signal.SIGSTOP)
    stream.join()
    assert isinstance(stream.error, openai.APIError)
    assert not is_running(engine)
    wait_ready(restarting)
    assert restarting.engine_pid != engine


# Complaint 11: a health probe costs no slot, stays right under a long prefill, and does not pile up


def test_complaint_11_probes_of_a_stuck_engine_do_not_pile_up(restarting: ServedModel) -> None:
    wait_ready(restarting)
    engine, server = restarting.engine_pid, restarting.process.pid
    fds = num_fds(server)
    os.kill(engine, signal.SIGSTOP)
    try:
        probes = []
        for _ in range(200):  # each leaves before the answer
            probe = socket.create_connection(("127.0.0.1", restarting.port))
            probe.sendall(b"GET /health/ready HTTP/1.1\r\nhost: test\r\n\r\n")
            probes.append(probe)
        for probe in probes:
            probe.close()
        wait_for(lambda: num_fds(server) <= fds)
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_ready(restarting)
    assert restarting.engine_pid == engine


# Complaint 12: engine death never ends in exit code 0


def test_complaint_12_a_server_whose_engine_has_died_exits_with_3(death: Death) -> None:
    assert death.exit_code == 3


# Complaint 13: the API server is killed: the engine notices and exits


def test_complaint_13_the_engine_exits_with_its_killed_server(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        caller = Caller(server, COMPLETIONS, {**FOREVER, "stream": True})
        caller.read_until(b"data: ")  # a step is running
        engine = server.engine_pid
        server.process.kill()
        wait_for(lambda: not is_running(engine))
        caller.leave()


# Complaint 14: a start that hangs or fails: a deadline, one clear message with the cause, no orphans


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--startup-timeout", "0.05"], "--startup-timeout"),
        (["--kv-cache-memory", "1MiB"], "kv_cache_memory"),
    ],
    ids=["hangs", "fails"],
)
def test_complaint_14_a_start_that_fails_says_why_and_leaves_no_orphan(flags: list[str], cause: str) -> None:
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-m", "trioserve", "serve", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COMPLAINT_14": mark},
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert cause in done.stderr.splitlines()[-1]
    wait_for(lambda: not processes_marked(mark))


def processes_marked(mark: str) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and is_running(int(process.name)):
            try:
                environment = (process / "environ").read_bytes()
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
            if mark.encode() in environment:
                found.append(int(process.name))
    return found


# Complaint 15: SIGTERM


def test_complaint_15_sigterm_refuses_finishes_then_ends_the_rest(tmp_path: Path) -> None:
    with served(tmp_path, ["--shutdown-timeout", "5"]) as server:
        late = socket.create_connection(("127.0.0.1", server.port))
        request = http_request(COMPLETIONS, {**GREEDY, "prompt": "Hello"})
        late.sendall(request[:10])
        endless = Caller(server, COMPLETIONS, {**FOREVER, "stream": True})
        endless.read_until(b"data: ")
        short = Caller(server, COMPLETIONS, {**FOREVER, "stream": True, "max_tokens": 10})
        short.read_until(b"data: ")
        (engine,) = children_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "finishing what runs" in server.log)
        late.sendall(request[10:])
        assert late.recv(65536).startswith(b"HTTP/1.1 503")
        late.close()
        last_chunk, done = parse_events(short.read_to_end()[1])[-2:]
        assert (last_chunk["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        error, done = parse_events(endless.read_to_end()[1])[-2:]
        assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
        assert server.process.wait(30) == 0
        assert not is_running(engine)
        assert "Traceback" not in server.log
