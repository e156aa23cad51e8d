"""`trioserve complete`, against a server and with an engine of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers_chat_server import ChatServer, Terminal, running_chat_server
from helpers_llm import ScriptedLLM, scripted_engine
from trioserve.cli.local_source import LLMEngine
from trioserve.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with running_chat_server() as server:
        yield server


def test_one_quick_prompt(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-name", "second-model", "--max-tokens", "7"]
    assert main(["complete", "--url", server.url, "-q", "once", *flags]) == 0
    assert capsys.readouterr() == ("<once>\n", "")
    assert server.requests == [
        {
            "path": "/v1/completions",
            "model": "second-model",
            "stream": True,
            "prompt": "once",
            "max_tokens": 7,
        }
    ]


def test_max_tokens_is_left_to_the_server(server: ChatServer) -> None:
    assert main(["complete", "--url", server.url, "-q", "once"]) == 0
    assert "max_tokens" not in server.requests[0]


def test_a_prompt_from_a_pipe_is_taken_as_a_whole(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch, ["once", "", "upon a time"], is_tty=False)
    assert main(["complete", "--url", server.url]) == 0
    assert [request["prompt"] for request in server.requests] == ["once\n\nupon a time"]
    assert terminal.shown.getvalue() == "<once\n\nupon a time>\n"


def test_lines_of_a_terminal_are_prompts(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, ["once", "refuse", "twice"])
    assert main(["complete", "--url", server.url]) == 0
    assert [request["prompt"] for request in server.requests] == ["once", "refuse", "twice"]
    assert "> <twice>\n" in terminal.shown.getvalue()


def test_ctrl_c_stops_one_continuation(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, ["take forever", "once"])
    server.screen = terminal.shown
    assert main(["complete", "--url", server.url]) == 0
    assert server.client_left.wait(10)
    assert "> <once>\n" in terminal.shown.getvalue()


@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_a_wrong_length(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["complete", "--max-tokens", value])
    assert exited.value.code == 2
    assert (
        capsys.readouterr().err
        == f"trioserve complete: --max-tokens: must be an integer >= 1, got '{value}'\n"
    )


@pytest.mark.parametrize(("flags", "max_tokens"), [([], 99), (["--max-tokens", "2k"], 2000)])
def test_with_an_engine_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], max_tokens: int
) -> None:
    engines: list[ScriptedLLM] = []

    def from_engine_args(args: object) -> LLMEngine:
        engine, scripted = scripted_engine()
        engines.append(scripted)
        return engine

    monkeypatch.setattr(LLMEngine, "from_engine_args", from_engine_args)
    assert main(["complete", "-q", "once upon", *flags]) == 0
    assert capsys.readouterr() == (" ONCE UPON\n", "")
    assert engines[0].submitted[0].params.max_tokens == max_tokens
    assert engines[0].was_closed
