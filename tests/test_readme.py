"""What the README and the examples show is run, as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from served import MODEL
from trioserve import LLM, AsyncLLM, EngineArgs, SamplingParams
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from served import ServedModel

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str, document: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_example(server: ServedModel) -> None:
    (command,) = (block for block in blocks("console") if block.startswith("curl"))
    answer = json.loads(run(["bash", "-c", command.replace("http://127.0.0.1:8000", server.url)]))
    assert "Tokyo" in answer["choices"][0]["message"]["content"]


def test_the_openai_example(server: ServedModel) -> None:
    (program,) = (block for block in blocks("python") if "from openai" in block)
    assert "Tokyo" in run([sys.executable, "-c", program.replace("http://127.0.0.1:8000", server.url)])
    (question,) = re.findall(r'"content": "(.*)"', program)
    with LLM(model=MODEL, threads=1) as llm:  # in the model's own precision, as a newcomer asks
        (answer,) = llm.chat(
            [{"role": "user", "content": question}],
            SamplingParams(temperature=0, max_tokens=32),
            use_tqdm=False,
        )
    assert answer.outputs[0].text == "The capital of Japan is Tokyo."


@pytest.mark.parametrize("kind", ["AsyncLLM", "LLM("])
def test_the_library_and_offline_examples(kind: str) -> None:
    (program,) = (block for block in blocks("python") if kind in block)
    assert "Paris" in run([sys.executable, "-c", program])


def test_the_examples_of_the_features() -> None:
    offline, sleeping = blocks("python", (ROOT / "docs" / "features.md").read_text())
    age, *scores, first, second, third = run([sys.executable, "-c", offline]).split("\n")[:7]
    assert age == "30"
    assert [score.split()[0] for score in scores] == ["is", "in", "France"]
    assert float(first.split()[0]) > float(second.split()[0])
    assert "Paris" in first + second + third
    assert "Paris" in run([sys.executable, "-c", sleeping])


def test_the_example_of_http(server: ServedModel) -> None:
    command, *_ = blocks("console", (ROOT / "docs" / "http.md").read_text())
    answer = json.loads(run(["bash", "-c", command.replace("http://127.0.0.1:8000", server.url)]))
    person = json.loads(answer["choices"][0]["message"]["content"])
    assert person["age"] == 42
    assert person.keys() == {"name", "age"}


@pytest.mark.parametrize("name", ["library.py", "offline.py", "streaming_input.py"])
def test_the_example_programs(name: str) -> None:
    assert "Paris" in run([sys.executable, str(ROOT / "examples" / name)])


def test_the_openai_client_program(server: ServedModel) -> None:
    program = str(ROOT / "examples" / "openai_client.py")
    assert "Tokyo" in run([sys.executable, program, f"{server.url}/v1"])


async def test_the_api_inside_somebody_elses_application_under_stock_hypercorn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from own_app import create_own_app  # type: ignore[import-not-found]

    config = Config()
    config.bind = ["127.0.0.1:0"]
    async with (
        AsyncLLM.from_engine_args(EngineArgs.from_dict({"log": {"stats_interval": 0}})) as llm,
        trio.open_nursery() as nursery,
    ):
        ready = await nursery.start(serve, create_own_app(llm), config)
        curl = ["curl", "-s", "--max-time", "60"]
        haiku = await trio.run_process([*curl, f"{ready[0]}/haiku"], capture_stdout=True)
        models = await trio.run_process([*curl, f"{ready[0]}/llm/v1/models"], capture_stdout=True)
        nursery.cancel_scope.cancel()
    assert haiku.stdout
    assert json.loads(models.stdout)["data"][0]["id"] == "smollm2-135m"


def test_every_flag_the_documents_name_exists() -> None:
    commands = ("serve", "chat", "run-batch", "doctor")
    help_text = "".join(run([sys.executable, "-m", "trioserve", name, "--help"]) for name in commands)
    help_text += "".join(script.read_text() for script in ROOT.glob("benchmarks/*.py"))
    for document in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for flag in set(re.findall(r"[` ](--[a-z][a-z-]+)", document.read_text())):
            assert flag in help_text, f"{document.name} names {flag}"


def test_every_file_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in set(
        re.findall(r"`?((?:tests|server|link|core|worker|model_sources|cli)/[a-z_0-9]+\.py)", text)
    ):
        assert any((base / name).exists() for base in (ROOT, ROOT / "trioserve")), name


def test_every_test_the_documents_name_exists() -> None:
    for document in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for name in set(re.findall(r"`((?:test|cancel)_[a-z_0-9*]*\.py)`", document.read_text())):
            assert [*(ROOT / "tests").glob(name)], f"{document.name} names {name}"


def test_the_limits_the_documents_state_are_the_defaults() -> None:
    defaults = {**attrs.asdict(EngineArgs()), **attrs.asdict(ServerArgs())}
    text = (ROOT / "docs" / "reliability.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `--([a-z-]+)`[^|]* \| ([^|]+) \|$", text, re.MULTILINE)
    stated = {flag: default for flag, default in rows if defaults[flag.replace("-", "_")] is not None}
    assert stated == {flag: _shown(defaults[flag.replace("-", "_")]) for flag in stated}
    assert len(stated) >= 10


def _shown(default: float) -> str:
    """Times are floats, and sizes integers."""
    if isinstance(default, float):
        days = default / 86400
        return f"{days:g} days" if days >= 1 and days.is_integer() else f"{default:g} s"
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if default % size == 0:
            return f"{default // size} {unit}"
    return str(default)
