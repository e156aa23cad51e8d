"""The `trioserve` command: subcommands, exit codes, and what each of them imports."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import trioserve.cli.chat
from trioserve.cli.main import main
from trioserve.errors import EngineDeadError, EngineStartError, TrioserveError
from trioserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trioserve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRIOSERVE_API_KEY"},
    )


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("serve", "chat", "complete", "run-batch", "doctor"):
        assert f"\n  {command} " in shown
    assert main([]) == 2


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert capsys.readouterr().err == "trioserve: 'serv': unknown command; did you mean serve?\n"
    assert main(["bake"]) == 2
    assert capsys.readouterr().err.endswith("the commands are serve, chat, complete, run-batch, doctor\n")


def failing_chat(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(arguments: Sequence[str]) -> int:
        raise error

    monkeypatch.setattr(trioserve.cli.chat, "run", run)


def test_our_own_errors_are_one_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_chat(monkeypatch, EngineStartError("no start:\n  out of memory\n\nTraceback ..."))
    assert main(["chat"]) == 1
    assert capsys.readouterr().err == "trioserve: no start: out of memory\n"
    group = BaseExceptionGroup("", [EngineDeadError("one"), ExceptionGroup("", [TrioserveError("two")])])
    failing_chat(monkeypatch, group)
    assert main(["chat"]) == 1
    assert capsys.readouterr().err == "trioserve: one\ntrioserve: two\n"


def test_errors_of_others_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_chat(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        main(["chat"])
    failing_chat(monkeypatch, ExceptionGroup("", [TrioserveError("one"), ZeroDivisionError("a bug")]))
    with pytest.RaisesGroup(TrioserveError, ZeroDivisionError):
        main(["chat"])


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing_chat(monkeypatch, KeyboardInterrupt())
    assert main(["chat"]) == 130
    failing_chat(monkeypatch, BaseExceptionGroup("", [KeyboardInterrupt(), TrioserveError("late")]))
    assert main(["chat"]) == 130
    assert capsys.readouterr() == ("", "")


def test_python_m_and_a_wrong_flag() -> None:
    done = run("serve", "--port", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "trioserve serve: --port: must be an integer from 0 to 65535, got 'x'\n"


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        ("['--version']", ["torch", "transformers", "httpx2", "quart", "trioserve.cli.flags"]),
        ("['serve', '--port', 'x']", ["torch", "transformers", "httpx2", "quart"]),
        ("['doctor', '/there/is/none']", ["torch", "transformers", "httpx2", "quart"]),
        ("['chat', '--url', 'http://localhost:1/v1', '-q', 'hi']", ["torch", "transformers", "quart"]),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: str, absent: list[str]) -> None:
    script = f"""
import sys
from trioserve.cli.main import main
try:
    main({arguments})
except SystemExit:
    pass
print([name for name in {absent} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_is_no_error() -> None:
    script = """
import os, sys
from trioserve.cli.main import main
import trioserve.cli.chat
def run(arguments):
    for _ in range(100_000):
        print("a line")
trioserve.cli.chat.run = run
sys.exit(main(["chat"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(30) == 1
