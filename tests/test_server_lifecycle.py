"""How a server starts, ends, and what it does when something dies under it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from helpers_streams import StreamInThread
from served import MODEL, children_of, is_running, served, wait_for
from trioserve import EngineArgs
from trioserve.cli.exit_codes import ExitCode
from trioserve.cli.serve_command import with_bounded_queue


def test_sigterm_lets_running_streams_finish_and_refuses_new_clients(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        stream = StreamInThread(server.url, max_tokens=60)
        engine = server.engine_pid
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "finishing what runs" in server.log)
        with pytest.raises(ConnectionRefusedError):
            wait_for(lambda: socket.create_connection(("127.0.0.1", server.port)).close())
        assert server.process.wait(60) == 0
        stream.join()
        assert stream.finished
        assert stream.error is None
        assert not is_running(engine)
        assert "Traceback" not in server.log


def test_an_open_server_says_so(tmp_path: Path) -> None:
    with served(tmp_path, ["--host", "0.0.0.0", "--shutdown-timeout", "0"]) as server:
        wait_for(lambda: "no --api-key" in server.log)


def test_the_drain_ends_after_its_time(tmp_path: Path) -> None:
    with served(tmp_path, ["--shutdown-timeout", "0.2"]) as server:
        stream = StreamInThread(server.url)
        assert server.terminate() == 0
        stream.join()
        assert not stream.finished
        assert isinstance(stream.error, openai.APIError)
        assert stream.error.code == "shutting_down"


def test_a_killed_engine_fails_its_requests_and_ends_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        stream = StreamInThread(server.url)
        os.kill(server.engine_pid, signal.SIGKILL)
        stream.join()
        assert isinstance(stream.error, openai.APIError)
        assert server.request("GET", "/health")[0] == 503
        assert server.process.wait(30) == 3
        assert "The engine core ended unexpectedly. (signal SIGKILL)" in server.log


def test_a_killed_server_takes_its_engine_along(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        stream = StreamInThread(server.url)
        engine = server.engine_pid
        server.process.kill()
        wait_for(lambda: not is_running(engine))
        stream.join()
        assert stream.error is not None


def test_a_second_start_needs_no_network(tmp_path: Path) -> None:
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_NO_INDEX": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    with served(tmp_path, environment=nowhere) as server:
        assert server.request("GET", "/v1/models")[1]["data"][0]["id"] == MODEL


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with served(tmp_path, ["--uds", str(path)]) as server:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.terminate() == 0
    assert not path.exists()


def test_api_keys(tmp_path: Path) -> None:
    with served(tmp_path, ["--api-key", "right"]) as server:
        assert server.request("GET", "/health")[0] == 200
        assert server.request("GET", "/v1/models")[0] == 401
        assert server.request("GET", "/v1/models", headers={"Authorization": "Bearer wrong"})[0] == 401
        assert server.request("GET", "/v1/models", headers={"Authorization": "Bearer right"})[0] == 200
        assert "right" not in server.log


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trioserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_engine_that_cannot_start_says_why_in_the_parents_error() -> None:
    done = run_cli("serve", "--port", "0", "--kv-cache-memory", "1MiB")
    assert done.returncode == 1
    assert "kv_cache_memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_that_takes_too_long_is_given_up() -> None:
    done = run_cli("serve", "--port", "0", "--startup-timeout", "0.05")
    assert done.returncode == 1
    assert "--startup-timeout" in done.stderr


def test_a_port_that_is_taken_is_known_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_cli("serve", "--port", str(port))
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1" in done.stderr


def test_the_help_lists_the_exit_codes() -> None:
    _, _, exit_codes = run_cli("serve", "--help").stdout.partition("Exit codes:")
    assert re.findall(r"\b\d+\b", exit_codes) == [
        str(int(code)) for code in ExitCode if code is not ExitCode.LINES_FAILED
    ]


def test_a_server_lets_only_so_many_requests_wait_unless_it_is_told_otherwise() -> None:
    assert with_bounded_queue(EngineArgs(max_num_seqs=3)).max_num_queued_reqs == 48
    assert with_bounded_queue(EngineArgs(max_num_queued_reqs=7)).max_num_queued_reqs == 7
    assert EngineArgs().create_engine_config().admission.max_num_queued_reqs is None


def test_a_model_that_is_not_there_says_what_there_is() -> None:
    done = run_cli("serve", "./no-such-model.gguf", "--port", "0")
    assert done.returncode == 1
    assert "no-such-model.gguf" in done.stderr


def test_an_interrupted_start_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trioserve", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: _engines_of(process.pid) or process.poll() is not None)
        engines = _engines_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "Traceback" not in (process.stderr.read() if process.stderr else "")
    assert not any(map(is_running, engines))


def _engines_of(pid: int) -> list[int]:
    """Without the helpers that Python's and trio's own imports start."""
    return [child for child in children_of(pid) if "engine_process" in _command_line(child)]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_the_access_log_has_a_line_per_request_and_no_prompt(tmp_path: Path) -> None:
    with served(tmp_path, ["--log.requests"]) as server:
        body = {"model": MODEL, "prompt": "my secret", "max_tokens": 2}
        assert server.request("POST", "/v1/completions", body)[0] == 200
        wait_for(lambda: re.search(r"POST /v1/completions 200 [\d.]+ ms", server.log))
        assert "prompt tokens" in server.log
        assert "secret" not in server.log
        assert json.dumps(body) not in server.log
