"""Engine cores that are killed, stopped and stuck, under an embedder and under `trioserve serve`."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import openai
import pytest
import trio

from helpers_streams import StreamInThread
from served import MODEL, STEADY, children_of, is_running, served, wait_for
from trioserve import LLM, AsyncLLM, EngineArgs, EngineDeadError, SamplingParams
from trioserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve import RequestStream

FOREVER = SamplingParams(max_tokens=4000, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPT = "The capital of France is"


def engine_args(**values: object) -> EngineArgs:
    defaults = {"engine_restart": "on-failure", "engine_restart_backoff": 0.05, "dtype": STEADY}
    return EngineArgs.from_dict(
        {"model": MODEL, "threads": 1, "log": {"stats_interval": 0}, **defaults, **values}
    )


async def read_all(outputs: RequestStream) -> None:
    async for _ in outputs:
        pass


# Under an embedder


STUCK = """
    import re, time

    class Stuck:
        '''extra_args: {"stuck": what to do for ever, after some tokens}.'''

        def __init__(self, context):
            pass

        @classmethod
        def validate_params(cls, params):
            pass

        def is_argmax_invariant(self):
            return True

        def apply(self, logits, rows):
            for row in rows:
                how = (row.params.extra_args or {}).get("stuck")
                if how and len(row.output_token_ids) == 50:
                    self.get_stuck(how)
            return logits

        def get_stuck(self, how):
            if how == "asleep":
                time.sleep(3600)
            else:  # with the GIL
                re.match(r"(a+)+$", "a" * 60 + "b")
"""

DEATHS: dict[str, tuple[int | None, str]] = {
    "killed": (signal.SIGKILL, r"signal SIGKILL"),
    "stopped": (signal.SIGSTOP, r"not answered for 3 seconds .*it had to be killed"),
    "asleep": (None, r"a step took longer than 3 seconds"),
    "with the GIL": (None, r"not answered for 3 seconds"),
}
"""A signal, or a step that is stuck in this way; and what the request that runs is told."""


async def test_however_a_core_dies_the_next_one_takes_over_what_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_children: Any
) -> None:
    """One core after the other, as each start takes seconds. What waits gets what it would have got."""
    (tmp_path / "stuck_processor.py").write_text(textwrap.dedent(STUCK))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    args = engine_args(
        max_num_seqs=1, step_timeout=3, requeue_on_restart=True, logits_processors="stuck_processor:Stuck"
    )
    async with AsyncLLM.from_engine_args(args) as llm:
        expected = await complete(llm)
        assert "Paris" in expected
        for how, (number, text) in DEATHS.items():
            (engine,) = own_children()
            answers: list[str] = []
            params = attrs.evolve(FOREVER, extra_args={"stuck": how})
            async with llm.stream("x", params) as outputs, trio.open_nursery() as nursery:
                await anext(outputs)
                nursery.start_soon(complete, llm, answers)
                with trio.fail_after(30):
                    while not llm.metrics.totals().waiting:
                        await anext(outputs)
                if number is not None:
                    os.kill(engine, number)
                with pytest.raises(EngineDeadError, match=text):
                    await read_all(outputs)
            assert answers == [expected], how
            assert not is_running(engine)
    assert not llm.errored


async def complete(llm: AsyncLLM, answers: list[str] | None = None) -> str:
    text = (await llm.complete(PROMPT, GREEDY)).outputs[0].text
    if answers is not None:
        answers.append(text)
    return text


async def test_in_process_a_stuck_step_is_waited_for_and_a_slow_control_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    execute, load = ModelRunner.execute, ModelRunner.load_weights
    is_stuck = False

    def get_stuck(self: ModelRunner, batch: Any) -> Any:
        while is_stuck:
            time.sleep(0.01)
        return execute(self, batch)

    def load_slowly(self: ModelRunner) -> None:
        time.sleep(4)
        load(self)

    monkeypatch.setattr(ModelRunner, "execute", get_stuck)
    one_token = SamplingParams(max_tokens=1)
    # One thread: in this process OpenMP's would spin, and on a busy machine take seconds for a step.
    args = engine_args(step_timeout=3, engine="inproc", threads=1)
    async with AsyncLLM.from_engine_args(args) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "load_weights", load_slowly)
            await llm.sleep(2)
            await llm.wake_up()
        assert (await llm.complete("x", one_token)).finished
        assert llm.is_running
        is_stuck = True
        with pytest.raises(EngineDeadError, match="a step took longer"):
            await llm.complete("x", one_token)
        assert not llm.is_running
        is_stuck = False
        await llm.wait_ready()
        assert (await llm.complete("x", one_token)).finished
        (line,) = [line for line in llm.metrics.render().splitlines() if b":engine_deaths_total{" in line]
        assert line.endswith(b" 1.0")


def test_offline_a_killed_core_fails_the_call_and_the_next_one_waits(own_children: Any) -> None:
    with LLM.from_engine_args(engine_args()) as llm:
        llm.enqueue("x", FOREVER)
        os.kill(own_children().pop(), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            llm.wait_for_completion(use_tqdm=False)
        (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert output.finished


# Under the server


def test_a_server_goes_on_with_another_engine_until_the_limit_is_reached(tmp_path: Path) -> None:
    flags = "--engine-restart on-failure --engine-restart-limit 2 --engine-restart-backoff 0.5"
    with served(tmp_path, flags.split()) as server:
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
        killed: set[int] = set()
        while server.process.poll() is None:
            for engine in set(children_of(server.process.pid)) - killed:
                os.kill(engine, signal.SIGKILL)
                killed.add(engine)
            time.sleep(0.01)
        assert server.process.wait() == 3
        assert len(killed) == 2
        assert "could not be restarted" in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("restart", "order"),
    [
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
