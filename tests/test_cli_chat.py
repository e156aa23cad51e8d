"""`trioserve chat`, against a server and with an engine of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers_chat_server import INTERRUPT, ChatServer, Terminal, running_chat_server
from helpers_llm import ScriptedLLM, scripted_engine
from trioserve.cli.local_source import LLMEngine
from trioserve.cli.main import main
from trioserve.errors import InvalidConfigError
from trioserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.args import EngineArgs

CHAT = ["chat", "--url"]


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIOSERVE_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with running_chat_server() as server:
        yield server


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_one_quick_message(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAT, server.url, "-q", "hi"]) == 0
    assert capsys.readouterr() == ("<hi>\n", "")
    (request,) = server.requests
    assert request == {
        "path": "/v1/chat/completions",
        "model": "first-model",
        "stream": True,
        "messages": [user("hi")],
    }
    assert server.keys == [None, None]


def test_model_name_key_and_system_prompt(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-name", "second-model", "--api-key", "sesame", "--system-prompt", "be brief"]
    assert main([*CHAT, server.url + "/", "-q", "hi", *flags]) == 0
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["model"] == "second-model"
    assert request["messages"] == [{"role": "system", "content": "be brief"}, user("hi")]
    assert server.keys == ["Bearer sesame"]


def test_the_key_may_come_from_the_environment(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOSERVE_API_KEY", "from-env")
    assert main([*CHAT, server.url, "-q", "hi"]) == 0
    assert server.keys == ["Bearer from-env"] * 2


def test_a_conversation_is_remembered(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, ["hi", "", "more", "/clear", "anew", "/exit", "never said"])
    assert main([*CHAT, server.url]) == 0
    assert [request["messages"] for request in server.requests] == [
        [user("hi")],
        [user("hi"), assistant("<hi>"), user("more")],
        [user("anew")],
    ]
    for answer in ("<hi>\n", "<more>\n", "<anew>\n"):
        assert answer in terminal.shown.getvalue()


def test_ctrl_d_ends(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    Terminal(monkeypatch, ["hi"])
    assert main([*CHAT, server.url]) == 0
    assert len(server.requests) == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch, [INTERRUPT, "take forever", "hi"])
    server.screen = terminal.shown
    assert main([*CHAT, server.url]) == 0
    assert server.client_left.wait(10)
    assert server.requests[-1]["messages"] == [user("take forever"), assistant("partial"), user("hi")]
    assert terminal.shown.getvalue().endswith("> <hi>\n> \n")


def test_ctrl_c_in_a_quick_message_ends_the_program(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.screen = Terminal(monkeypatch, []).shown
    assert main([*CHAT, server.url, "-q", "take forever"]) == 130
    assert server.client_left.wait(10)


FAILURES = {
    "refuse": "the server answered 404: there is no such model",
    "fall over": "the server answered 500: plain words",
    "fail midway": "the engine died",
    "break off": "the server broke off the answer",
    "talk html": "Expected response with content type 'text/event-stream', got 'text/html'.",
    "talk nonsense": "what came is not of the OpenAI API: ",
}


@pytest.mark.parametrize("message", FAILURES)
def test_errors_of_the_server_are_one_line(
    server: ChatServer, capsys: pytest.CaptureFixture[str], message: str
) -> None:
    assert main([*CHAT, server.url, "-q", message]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trioserve: ")
    assert FAILURES[message] in line


def test_errors_do_not_end_a_conversation(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Terminal(monkeypatch, ["refuse", "hi", "fail midway", "more"])
    assert main([*CHAT, server.url]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "trioserve chat: the server answered 404: there is no such model",
        "trioserve chat: the engine died",
    ]
    assert server.requests[-1]["messages"] == [
        user("hi"),
        assistant("<hi>"),
        user("fail midway"),
        assistant("partial"),
        user("more"),
    ]


def test_a_server_that_sends_no_done(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHAT, server.url, "-q", "finish without done"]) == 0
    assert capsys.readouterr() == ("fine\n", "")


def test_a_server_without_models(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = []
    assert main([*CHAT, server.url, "-q", "hi"]) == 1
    assert capsys.readouterr().err == "trioserve: the server has no model\n"


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with running_chat_server() as server:
        url = server.url
    assert main([*CHAT, url, "-q", "hi"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trioserve: {url}: ")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--url", "localhost"], "--url: must begin with http:// or https://, got 'localhost'"),
        (["--model-name", "m"], "--model-name: goes with --url, which is not given"),
        (["--api-key", "k"], "--api-key: goes with --url, which is not given"),
        (["--url", "http://x", "m"], "--model: does not go with --url; use --model-name"),
        (
            ["--url", "http://x", "--threads", "2"],
            "--threads: does not go with --url; it would be the server's",
        ),
        (["--thread", "2"], "--thread: unknown flag; did you mean --threads?"),
        (["--port", "2"], "--port: unknown flag; see trioserve chat --help"),
    ],
)
def test_flags_that_contradict_each_other(
    flags: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["chat", *flags])
    assert exited.value.code == 2
    assert capsys.readouterr().err == f"trioserve chat: {line}\n"


class Engines:
    """Every engine that the command started, with the arguments it was given."""

    def __init__(self) -> None:
        self.args: list[EngineArgs] = []
        self.scripted: list[ScriptedLLM] = []

    def from_engine_args(self, args: EngineArgs) -> LLMEngine:
        engine, scripted = scripted_engine()
        self.args.append(args)
        self.scripted.append(scripted)
        return engine


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines()
    monkeypatch.setattr(LLMEngine, "from_engine_args", engines.from_engine_args)
    return engines


def test_without_url_an_engine_is_started_and_ended(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "some/model", "--max-model-len", "1k", "-q", "hello there"]) == 0
    assert capsys.readouterr() == (" HELLO THERE\n", "")
    (args,) = engines.args
    assert (args.model, args.max_model_len) == ("some/model", 1000)
    (scripted,) = engines.scripted
    (request,) = scripted.submitted
    assert request.params.output_kind is RequestOutputKind.DELTA
    assert (request.params.temperature, request.params.max_tokens) == (0.25, 99)
    assert scripted.was_closed


def test_an_own_engines_conversation(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, ["one two", "interrupt", "three", "/exit"])
    assert main(["chat", "--system-prompt", "be brief"]) == 0
    (scripted,) = engines.scripted
    contents: list[Any] = [[message["content"] for message in seen] for seen, _ in scripted.rendered]
    assert contents[-1] == ["be brief", "one two", " ONE TWO", "three"]
    assert " THREE\n" in terminal.shown.getvalue()


def test_an_engine_that_dies_ends_the_conversation(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Terminal(monkeypatch, ["refuse", "die", "never said"])
    assert main(["chat"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "trioserve chat: prompt must be nicer.",
        "trioserve: the engine is gone",
    ]
    assert engines.scripted[0].was_closed


def test_an_engine_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: EngineArgs) -> LLMEngine:
        raise InvalidConfigError("threads must be fewer.", field="threads")

    monkeypatch.setattr(LLMEngine, "from_engine_args", refuse)
    assert main(["chat", "-q", "hi"]) == 1
    assert capsys.readouterr().err == "trioserve: threads must be fewer.\n"
