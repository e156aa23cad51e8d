"""`trioserve serve` with several models, each with an engine core of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import openai
import pytest

from helpers_streams import StreamInThread
from served import MODEL, ServedModel, children_of, is_running, served, wait_for
from trioserve.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLAGS = [
    "--kv-cache-memory", "256MiB",
    "--model", f'{{"model": "{MODEL}", "served_model_name": "long"}}',
    "--model", f'{{"model": "{MODEL}", "served_model_name": ["short", "tiny"], "max_model_len": 1000}}',
    "--model", "minilm-l6",
]  # fmt: skip
RESTARTS = ["--engine-restart", "on-failure", "--engine-restart-backoff", "0.2"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    with served(tmp_path_factory.mktemp("both"), [*FLAGS, *RESTARTS]) as server:
        yield server
        server.wait_until_idle()
        assert server.terminate() == 0, server.log
        assert "Traceback" not in server.log, server.log


def ask(server: ServedModel, model: str, prompt: str = "Once upon") -> tuple[int, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "model": model}
    return server.request("POST", "/v1/completions", body)


def test_each_answers_under_its_names(both: ServedModel) -> None:
    answers = [ask(both, name) for name in ("long", "short", "tiny")]
    assert [status for status, _ in answers] == [200] * 3
    assert [answer["model"] for _, answer in answers] == ["long", "short", "short"]
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1, "it is the same model"
    assert ask(both, "long", "word " * 1001)[0] == 200
    assert ask(both, "short", "word " * 1001)[0] == 400, "its context is another one"
    assert ask(both, MODEL)[0] == 404


def test_one_of_them_pools(both: ServedModel) -> None:
    status, reply = both.request("POST", "/v1/embeddings", {"input": ["Hello", "World"]})
    assert (status, reply["model"], len(reply["data"])) == (200, "minilm-l6", 2)
    assert both.request("POST", "/v1/embeddings", {"input": "Hello", "model": "short"})[0] == 400
    assert ask(both, "minilm-l6")[0] == 400


def test_the_openai_client_sees_both(both: ServedModel) -> None:
    with openai.OpenAI(base_url=f"{both.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["long", "short", "tiny", "minilm-l6"]
        for name in ("long", "short"):
            messages: Any = [{"role": "user", "content": "Hi"}]
            reply = client.chat.completions.create(model=name, messages=messages, max_tokens=2)
            assert reply.model == name


def test_one_engine_dies_and_the_others_go_on(both: ServedModel) -> None:
    assert both.metric("engine_up") == 3
    engines = children_of(both.process.pid)
    streams = {name: StreamInThread(both.url, max_tokens=400, model=name) for name in ("long", "short")}
    os.kill(engines[1], signal.SIGKILL)
    wait_for(lambda: both.request("GET", "/health")[0] == 503)
    message = both.request("GET", "/health/ready")[1]["error"]["message"]
    dead = message.removeprefix("The server is not ready: restarting (").removesuffix(").")
    others = {"long", "short", "minilm-l6"} - {dead}
    assert len(others) == 2
    assert use(both, dead) == 503
    assert [use(both, name) for name in others] == [200, 200]
    for name, stream in streams.items():
        stream.join()
        assert stream.finished == (name != dead)
        assert name != dead or isinstance(stream.error, openai.APIError)
    wait_for(lambda: use(both, dead) == 200)
    assert set(engines) & set(children_of(both.process.pid)) == {engines[0], engines[2]}
    assert both.request("GET", "/health/ready")[0] == 200
    assert f"{dead}: The engine core ended unexpectedly. (signal SIGKILL)" in both.log


def use(server: ServedModel, name: str) -> int:
    """Let the model do what it can; returns the status."""
    if name == "minilm-l6":
        return server.request("POST", "/v1/embeddings", {"input": "Hello", "model": name})[0]
    return ask(server, name)[0]


def test_a_drain_waits_for_all(tmp_path: Path) -> None:
    with served(tmp_path, FLAGS) as server:
        streams = [StreamInThread(server.url, max_tokens=100, model=name) for name in ("long", "tiny")]
        engines = children_of(server.process.pid)
        assert server.terminate() == 0
        for stream in streams:
            stream.join()
            assert stream.finished
        assert not any(map(is_running, engines))
        assert "Traceback" not in server.log


def test_an_engine_that_is_not_replaced_ends_the_server(tmp_path: Path) -> None:
    with served(tmp_path, FLAGS) as server:
        engines = children_of(server.process.pid)
        os.kill(engines[1], signal.SIGKILL)
        assert server.process.wait(30) == ExitCode.ENGINE_DEAD
        assert "is dead; stopping with exit code 3" in server.log
        assert not any(map(is_running, engines))
        assert "Traceback" not in server.log


def test_a_model_that_cannot_start_ends_the_others(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trioserve", "serve", "--port", "0", "--model", MODEL]
    wrong = f'{{"model": "{MODEL}", "served_model_name": "wrong", "kv_cache_memory": "1MiB"}}'
    done = subprocess.run(
        [*command, "--model", wrong], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == ExitCode.FAILED
    assert "wrong cannot be served" in done.stderr
    assert "kv_cache_memory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
