"""Engine cores that are killed, stopped and stuck, under an embedder and under `trioserve serve`."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
import trio

from helpers_streams import StreamInThread
from served import MODEL, children_of, is_running, served, wait_for
from trioserve import LLM, AsyncLLM, EngineArgs, EngineDeadError, SamplingParams
from trioserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve import RequestStream

FOREVER = SamplingParams(max_tokens=4000, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPT = "The capital of France is"


def engine_args(**values: object) -> EngineArgs:
    defaults = {"engine_restart": "on-failure", "engine_restart_backoff": 0.05, "dtype": "float32"}
    return EngineArgs.from_dict({"model": MODEL, "log": {"stats_interval": 0}, **defaults, **values})


async def read_all(outputs: RequestStream) -> None:
    async for _ in outputs:
        pass


# Under an embedder


async def test_a_waiting_request_gets_from_the_next_core_what_it_would_have_got(own_children: Any) -> None:
    texts: list[str] = []

    async def wait_behind(llm: AsyncLLM) -> None:
        texts.append((await llm.complete(PROMPT, GREEDY)).outputs[0].text)

    async with AsyncLLM.from_engine_args(engine_args(max_num_seqs=1, requeue_on_restart=True)) as llm:
        await wait_behind(llm)
        (engine,) = own_children()
        async with llm.stream("x", FOREVER) as outputs, trio.open_nursery() as nursery:
            await anext(outputs)
            nursery.start_soon(wait_behind, llm)
            with trio.fail_after(30):
                while not llm.metrics.totals().waiting:
                    await anext(outputs)
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await read_all(outputs)
        assert texts[0] == texts[1]
        assert "Paris" in texts[0]
        assert not is_running(engine)
        assert len(own_children()) == 1


async def test_a_stopped_core_is_found_killed_and_replaced(own_children: Any) -> None:
    async with AsyncLLM.from_engine_args(engine_args(step_timeout=3)) as llm:
        (engine,) = own_children()
        async with llm.stream("x", FOREVER) as outputs:
            await anext(outputs)
            os.kill(engine, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match=r"not answered for 3 seconds .*it had to be killed"):
                await read_all(outputs)
        assert not is_running(engine)
        await llm.wait_ready()
        assert (await llm.complete(PROMPT, GREEDY)).outputs[0].token_ids


STUCK = """
    import re, time

    class Stuck:
        '''extra_args: {"stuck": what to do for ever}.'''

        def __init__(self, context):
            pass

        @classmethod
        def validate_params(cls, params):
            pass

        def is_argmax_invariant(self):
            return True

        def apply(self, logits, rows):
            for row in rows:
                match (row.params.extra_args or {}).get("stuck"):
                    case "asleep":
                        time.sleep(3600)
                    case "with the GIL":
                        re.match(r"(a+)+$", "a" * 60 + "b")
            return logits
"""


@pytest.mark.parametrize(
    ("how", "text"),
    [("asleep", "a step took longer than 3 seconds"), ("with the GIL", "not answered for 3 seconds")],
)
async def test_a_stuck_step_is_a_death(
    how: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_children: Any
) -> None:
    (tmp_path / "stuck_processor.py").write_text(textwrap.dedent(STUCK))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = engine_args(step_timeout=3, logits_processors="stuck_processor:Stuck")
    async with AsyncLLM.from_engine_args(args) as llm:
        (engine,) = own_children()
        with pytest.raises(EngineDeadError, match=text):
            await llm.complete("x", SamplingParams(extra_args={"stuck": how}))
        assert not is_running(engine)
        await llm.wait_ready()
        assert (await llm.complete(PROMPT, GREEDY)).outputs[0].token_ids


async def test_in_process_a_stuck_step_fails_its_requests_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    execute = ModelRunner.execute
    is_stuck = True

    def get_stuck(self: ModelRunner, batch: Any) -> Any:
        while is_stuck:
            time.sleep(0.01)
        return execute(self, batch)

    monkeypatch.setattr(ModelRunner, "execute", get_stuck)
    async with AsyncLLM.from_engine_args(engine_args(step_timeout=2, engine="inproc")) as llm:
        with pytest.raises(EngineDeadError, match="a step took longer"):
            await llm.complete("x")
        assert not llm.is_running
        is_stuck = False
        await llm.wait_ready()
        assert (await llm.complete("x", SamplingParams(max_tokens=1))).finished


async def test_a_control_that_takes_long_is_no_stuck_step(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ModelRunner.load_weights

    def load_slowly(self: ModelRunner) -> None:
        time.sleep(4)
        load(self)

    async with AsyncLLM.from_engine_args(engine_args(step_timeout=2, engine="inproc")) as llm:
        monkeypatch.setattr(ModelRunner, "load_weights", load_slowly)
        await llm.sleep(2)
        await llm.wake_up()
        assert (await llm.complete("x", SamplingParams(max_tokens=1))).finished
        (line,) = [line for line in llm.metrics.render().splitlines() if b":engine_deaths_total{" in line]
        assert line.endswith(b" 0.0")


def test_offline_a_killed_core_fails_the_call_and_the_next_one_waits(own_children: Any) -> None:
    with LLM.from_engine_args(engine_args()) as llm:
        llm.enqueue("x", FOREVER)
        os.kill(own_children().pop(), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            llm.wait_for_completion(use_tqdm=False)
        (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert output.finished


# Under the server


def test_a_killed_engine_is_restarted_under_a_server_that_goes_on(tmp_path: Path) -> None:
    flags = ["--engine-restart", "on-failure", "--engine-restart-backoff", "1"]
    with served(tmp_path, flags) as server:
        streams = [StreamInThread(server.url) for _ in range(4)]
        engine = server.engine_pid
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            stream.join()
            assert isinstance(stream.error, openai.APIError)
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        response = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 2
        assert server.request("GET", "/health/ready")[0] == 503
        assert server.request("GET", "/health/live")[0] == 200
        wait_for(lambda: server.request("GET", "/health/ready")[0] == 200, 60)
        assert server.request("POST", "/v1/completions", body)[0] == 200
        assert server.metric("engine_restarts_total") == 1
        assert server.metric("engine_up") == 1
        assert server.engine_pid != engine
        assert "SIGKILL" in server.log
        assert server.terminate() == 0
        assert "Traceback" not in server.log


def test_an_engine_that_always_dies_ends_the_server_with_its_exit_code(tmp_path: Path) -> None:
    flags = ["--engine-restart", "on-failure", "--engine-restart-limit", "2", "--engine-restart-backoff", "0"]
    with served(tmp_path, flags) as server:
        killed: set[int] = set()
        while server.process.poll() is None:
            for engine in set(children_of(server.process.pid)) - killed:
                os.kill(engine, signal.SIGKILL)
                killed.add(engine)
            time.sleep(0.01)
        assert server.process.wait() == 3
        assert len(killed) == 3
        assert "could not be restarted" in server.log


@pytest.mark.parametrize(
    ("restart", "order"),
    [
        ("never", "engine, server"),
        ("never", "server, engine"),
        ("never", "engine, server, server"),
        ("on-failure", "engine, server"),
    ],
)
def test_after_the_engines_death_the_exit_code_is_3_whatever_comes_with_it(
    tmp_path: Path, restart: str, order: str
) -> None:
    with served(tmp_path, ["--engine-restart", restart, "--engine-restart-backoff", "30"]) as server:
        pids = {"engine": server.engine_pid, "server": server.process.pid}
        for name in order.split(", "):
            os.kill(pids[name], signal.SIGKILL if name == "engine" else signal.SIGTERM)
        assert server.process.wait(30) == 3
