"""`trioserve run-batch` as a user runs it: processes, signals, pipes, exit codes, a real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from helpers_batch import BatchFolder, request_line
from served import MODEL, STEADY, ServedModel, children_of, is_running, wait_for
from trioserve.cli.main import main
from trioserve.cli.run_batch_command import parse

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-m", "trioserve", "run-batch", MODEL, "--dtype", STEADY]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def short(number: int) -> str:
    body = {**GREEDY, "prompt": f"The number {number} is", "max_tokens": 4, "ignore_eos": True}
    return request_line(f"short-{number}", body=body)


def long(number: int) -> str:
    body = {**GREEDY, "prompt": f"The number {number} is", "max_tokens": 2000, "ignore_eos": True}
    return request_line(f"long-{number}", body=body)


def test_interrupted_it_leaves_whole_lines_and_goes_on(tmp_path: Path, server: ServedModel) -> None:
    folder = BatchFolder(tmp_path)
    folder.write_input(*map(short, range(6)), *map(long, range(4)))
    command = [*COMMAND, "-i", str(folder.input), "-o", str(folder.output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: folder.num_results == 6 or process.poll() is not None, 120)
            (engine,) = children_of(process.pid)
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(30) == 130
            assert process.stderr is not None
            shown = process.stderr.read()
        finally:
            process.kill()
    assert not is_running(engine)
    assert "Traceback" not in shown
    assert "Answered lines:  60%" in shown.split("\r")[-1]
    before = folder.output.read_bytes()
    assert folder.by_id.keys() == {f"short-{number}" for number in range(6)}

    folder.write_input(*map(short, range(8)), "nope")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 4, done.stderr
    assert done.stderr.endswith("trioserve run-batch: 8 answered, 1 errors, 6 of them in earlier runs\n")
    assert folder.output.read_bytes().startswith(before)
    for number in range(8):
        body = json.loads(short(number))["body"]
        _, answer = server.request("POST", "/v1/completions", body)
        found = folder.by_id[f"short-{number}"]["response"]["body"]
        assert found["choices"] == answer["choices"]


def test_from_a_pipe_to_a_pipe() -> None:
    command = [*COMMAND, "-i", "-", "-o", "-", "--no-progress-bar", "--concurrency", "1"]
    lines = "\n".join(map(short, range(3)))
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "trioserve run-batch: 3 answered, 0 errors\n")
    names = [json.loads(line)["custom_id"] for line in done.stdout.splitlines()]
    assert names == ["short-0", "short-1", "short-2"]


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"trioserve: cannot read {tmp_path}/none: No such file or directory.\n"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "the following arguments are required: -i/--input-file, -o/--output-file"),
        (["-i", "https://a/b"], "-i/--input-file: must be a local file or -, got 'https://a/b'"),
        (["--concurrency", "0"], "--concurrency: must be an integer >= 1, got '0'"),
        (["--max-json-depth", "0"], "--max-json-depth: must be an integer >= 1"),
        (["--port", "1"], "--port: unknown flag"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["-i", "in", "-o", "out"] if flags and flags[0] != "-i" else []
    with pytest.raises(SystemExit) as exited:
        main(["run-batch", *files, *flags])
    assert exited.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"trioserve run-batch: {problem}")
    assert shown.count("\n") == 1


def test_the_log_is_quiet_unless_it_is_asked_for() -> None:
    _, quiet, _ = parse(["-i", "in", "-o", "out"])
    assert (quiet.log.level, quiet.log.stats_interval) == ("warning", 0)
    _, asked, server_args = parse(["-i", "in", "-o", "out", "--log.level", "info", "--max-body-size", "1k"])
    assert (asked.log.level, asked.log.stats_interval) == ("info", 10)
    assert server_args.max_body_size == 1000
