"""The program `llm`, with the server among its extra models of OpenAI's kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import llm
import pytest
from weather import PERSON, PERSON_QUESTION, WEATHER_QUESTION, WEATHER_REPORT

if TYPE_CHECKING:
    from endpoint import Endpoint

MODELS = """
- model_id: {model}
  model_name: {model}
  api_base: "{api}"
  api_key_name: trioserve
  supports_tools: true
  supports_schema: true
  can_stream: true
"""


def get_weather(city: str) -> str:
    """The weather of a city."""
    return WEATHER_REPORT


@pytest.fixture
def home(tools: Endpoint, tmp_path: Path) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(model=tools.model, api=tools.api))
    (tmp_path / "keys.json").write_text(json.dumps({"trioserve": tools.key}))
    return tmp_path


def run(home: Path, endpoint: Endpoint, *arguments: str) -> str:
    program = Path(sys.executable).with_name("llm")
    options = ["-m", endpoint.model, "-o", "temperature", "0", "-o", "max_tokens", "64"]
    done = subprocess.run(
        [program, "prompt", *options, *arguments], env={**os.environ, "LLM_USER_PATH": str(home)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whole_and_streamed(home: Path, tools: Endpoint) -> None:
    streamed = run(home, tools, "What is the capital of France?")
    assert "Paris" in streamed
    assert run(home, tools, "--no-stream", "What is the capital of France?") == streamed


def test_a_schema(home: Path, tools: Endpoint) -> None:
    answer = run(home, tools, "--schema", json.dumps(PERSON), PERSON_QUESTION)
    assert json.loads(answer) == {"name": "Bob", "age": 42}


@pytest.mark.parametrize("stream", [True, False])
def test_a_tool(home: Path, tools: Endpoint, monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
    """By the library, which leaves it to its user whether the tool is offered again."""
    monkeypatch.setenv("LLM_USER_PATH", str(home))
    options = {"temperature": 0, "max_tokens": 64, "stream": stream}
    conversation = llm.get_model(tools.model).conversation()
    first = conversation.prompt(WEATHER_QUESTION, tools=[get_weather], **options)
    (call,) = first.tool_calls()
    assert (call.name, call.arguments) == ("get_weather", {"city": "Paris"})
    second = conversation.prompt(tool_results=first.execute_tool_calls(), **options)
    assert "17" in second.text()
