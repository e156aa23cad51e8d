"""schemathesis, by our own description, against the whole server over a scripted engine.

The same, deeper, and against a real model: `benchmarks/fuzz_api.py`.
"""

from __future__ import annotations

import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from helpers_api import VOCABULARY, FakeLLM
from helpers_pooling_api import FakePoolingLLM
from trioserve.errors import InvalidRequestError
from trioserve.server.app import create_app
from trioserve.server.http import HttpLimits, serve_http
from trioserve.server_args import ServerArgs

pytest.importorskip("schemathesis")

_FUZZ = Path(__file__).parent.parent / "benchmarks" / "fuzz_api.py"
_POOLING = "embed|pooling|classify|score|rerank"
_DULL = rf"completions/\{{|compact|/health|/ping|/version|/load|/metrics|/docs|{_POOLING}"
"""Routes that have the same answer for everybody, from a model that generates."""


class CarefulLLM(FakeLLM):
    """Refuses tokens that its vocabulary does not have, as an engine does."""

    def stream(self, prompt: Any, *arguments: Any, **named: Any) -> Any:
        _check(prompt)
        return super().stream(prompt, *arguments, **named)

    async def beam_search(self, prompt: Any, *arguments: Any, **named: Any) -> Any:
        _check(prompt)
        return await super().beam_search(prompt, *arguments, **named)


def _check(prompt: Any) -> None:
    if isinstance(prompt, list) and not all(0 <= token < len(VOCABULARY) for token in prompt):
        raise InvalidRequestError("prompt has unknown tokens.", parameter="prompt")


async def test_every_answer_is_as_described_and_none_is_a_server_error() -> None:
    llm = CarefulLLM()
    phases = "--phases=coverage,fuzzing,stateful"
    report = await fuzz(llm, phases, "--examples=8", "--max-time=30", "--exclude-path-regex", _DULL)
    assert len(llm.calls) > 20, report  # it did not only try what is refused


async def test_the_same_of_a_model_that_pools() -> None:
    """Nearly all is refused, as the description does not say which fields exclude each other."""
    llm = FakePoolingLLM("embed", "token_embed", "classify", "score")
    once = "embed|pooling|classify|^/score|^/rerank"  # under one spelling each
    await fuzz(
        llm, "--phases=coverage,fuzzing", "--examples=4", "--max-time=10", "--include-path-regex", once
    )


async def fuzz(llm: FakeLLM, *options: str) -> str:
    """The report of a run without findings."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(llm, ServerArgs())  # type: ignore[arg-type]  # the fake stands for an AsyncLLM
    async with trio.open_nursery() as nursery:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await nursery.start(
            partial(serve_http, app, [listener], HttpLimits(), shutdown=trio.Event(), access_log=False)
        )
        command = [
            sys.executable, str(_FUZZ), url, "--seed=1", "--no-shrink", *options,
        ]  # fmt: skip
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        nursery.cancel_scope.cancel()
    report = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, report
    assert not llm.running
    return report
