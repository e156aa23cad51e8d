from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from helpers_model_sources import GgufFile, model_config
from trioserve.config import GenerationDefaults, ResolvedModel
from trioserve.errors import InvalidConfigError, ModelNotSupportedError, ModelSourceError
from trioserve.model_sources import PACKAGED_MODELS, SilentProgress, TerminalProgress, resolve_model
from trioserve.model_sources.cache import cache_root, publish_directory
from trioserve.model_sources.helper_process import call_helper


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trioserve"


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a child process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write_directory(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"")
    (path / "tokenizer.json").write_text("{}")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def resolve(model: object, **changes: Any) -> ResolvedModel:
    return resolve_model(model_config(str(model), **changes), SilentProgress())


# Directories


def test_a_directory_that_transformers_saved(
    tmp_path: Path, no_children: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would stay
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=48,
        eos_token_id=7,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    found = resolve(tmp_path / "llama")
    assert found.directory == found.tokenizer_directory == str(tmp_path / "llama")
    assert (found.architecture, found.dtype) == ("LlamaForCausalLM", "float32")
    assert (found.vocab_size, found.context_length, found.max_model_len) == (64, 48, 48)
    assert found.eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("saved", "wanted", "served"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": "float32"}, "auto", "float32"),
        ({"dtype": "float32"}, "auto", "float32"),
        ({"torch_dtype": "float16"}, "auto", "bfloat16"),
        ({"torch_dtype": None}, "auto", "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "float32", "float32"),
        ({"torch_dtype": "float32"}, "bfloat16", "bfloat16"),
    ],
)
def test_dtype(tmp_path: Path, saved: dict[str, Any], wanted: str, served: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "torch_dtype"} | saved
    assert resolve(write_directory(tmp_path / "m", config), dtype=wanted).dtype == served


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", CONFIG, {"eos_token_id": [5, 2, 9]})
    assert resolve(directory).eos_token_ids == (5, 2, 9)


def test_generation_defaults_are_the_models_under_the_users(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 9}
    directory = write_directory(tmp_path / "m", CONFIG, generation)
    found = resolve(directory, generation=GenerationDefaults(temperature=0.1, min_p=0.2))
    assert found.generation == GenerationDefaults(temperature=0.1, top_k=20, min_p=0.2, max_new_tokens=9)


def test_a_greedy_model_says_nothing_about_sampling(tmp_path: Path) -> None:
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.5, "repetition_penalty": 1.1}
    directory = write_directory(tmp_path / "m", CONFIG, generation)
    assert resolve(directory).generation == GenerationDefaults(repetition_penalty=1.1)


def test_max_model_len_within_the_context(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", CONFIG)
    assert resolve(directory, max_model_len=100).max_model_len == 100
    with pytest.raises(InvalidConfigError, match=r"128.*129") as caught:
        resolve(directory, max_model_len=129)
    assert caught.value.field == "max_model_len"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            ["MambaForCausalLM", "'mamba'", "LlamaForC"],
        ),
        ({"architectures": None, "model_type": "x"}, ["no architecture", "'x'", "LlamaForCausalLM"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["'awq'", "bfloat16"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["'yarn'", "llama3"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope'", "linear"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, ["'yarn'", "linear"]),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    directory = write_directory(tmp_path / "m", CONFIG | change)
    with pytest.raises(ModelNotSupportedError) as caught:
        resolve(directory)
    assert all(word in str(caught.value) for word in [*words, str(directory)])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
    ],
)
def test_rope_scalings_that_are_served(tmp_path: Path, rope: dict[str, Any]) -> None:
    assert resolve(write_directory(tmp_path / "m", CONFIG | rope)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("missing", "word"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no .*safetensors"),
        ("tokenizer.json", "--tokenizer"),
    ],
)
def test_a_directory_with_a_file_missing(tmp_path: Path, missing: str, word: str) -> None:
    directory = write_directory(tmp_path / "m", CONFIG)
    (directory / missing).unlink()
    with pytest.raises(ModelSourceError, match=word):
        resolve(directory)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object"),
        ('{"architectures": ["LlamaForCausalLM"]}', "vocab_size is required"),
    ],
)
def test_a_config_that_makes_no_sense(tmp_path: Path, text: str, word: str) -> None:
    directory = write_directory(tmp_path / "m", CONFIG)
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelSourceError, match=word):
        resolve(directory)


def test_a_directory_that_holds_a_gguf_file_only(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelSourceError, match=r"model\.gguf: give that file"):
        resolve(tmp_path)


def test_shards_must_all_be_there(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", CONFIG)
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelSourceError, match=r"model-2\.safetensors is missing"):
        resolve(directory)
    (directory / "model-2.safetensors").write_bytes(b"")
    assert resolve(directory).vocab_size == 300


def test_another_tokenizer(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", CONFIG)
    (directory / "tokenizer.json").unlink()
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    found = resolve(directory, tokenizer=str(other))
    assert (found.directory, found.tokenizer_directory) == (str(directory), str(other))
    with pytest.raises(ModelSourceError, match="Cannot find the tokenizer 'nowhere'"):
        resolve(directory, tokenizer="nowhere")


# Names


@pytest.mark.parametrize("name", ["smollm2-136m", "./nowhere", "/no/where", "a/b/c", "~/nowhere", "x.gguf"])
def test_a_name_that_is_nothing(name: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        resolve(name)
    assert all(word in str(caught.value) for word in [repr(name), "smollm2-135m", "hub id", ".gguf"])


def test_a_packaged_model_of_another_kind_is_refused_before_it_is_fetched(
    no_children: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = attrs.evolve(PACKAGED_MODELS["smollm2-135m"], name="other", architecture="T5ForTranslation")
    monkeypatch.setitem(PACKAGED_MODELS, "other", other)
    with pytest.raises(ModelNotSupportedError, match=r"other.*T5ForTranslation.*LlamaForCausalLM"):
        resolve("other")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"abc")
    with pytest.raises(ModelSourceError, match=r"not a \.gguf file"):
        resolve(tmp_path / "model.bin")


# GGUF files: see test_gguf_conversion.py for what is in the converted directory


def test_a_gguf_file_is_converted_once(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = GgufFile().write(tmp_path / "tiny.gguf")
    found = resolve_model(model_config(path), TerminalProgress())
    assert "Converting tiny.gguf, once." in capsys.readouterr().err
    assert found.dtype == "bfloat16"
    assert [child.name for child in (cache / "converted").iterdir()] == [os.path.basename(found.directory)]

    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr("hashlib.sha256", _refuse_bytes_of(path))
    assert resolve_model(model_config(path), TerminalProgress()) == found
    assert capsys.readouterr().err == ""


def _refuse_bytes_of(path: Path) -> Any:
    """A sha256 that may be asked for short texts, not for a file's contents."""
    import hashlib

    real, head = hashlib.sha256, path.read_bytes()[:16]

    def sha256(data: bytes = b"") -> Any:
        assert data, "a file was hashed again"
        assert not data.startswith(head)
        return real(data)

    return sha256


def test_a_changed_gguf_file_is_converted_again(tmp_path: Path) -> None:
    path = GgufFile(rows=300).write(tmp_path / "tiny.gguf")
    first = resolve(path)
    path.unlink()
    GgufFile(rows=320).write(path)
    second = resolve(path)
    assert first.directory != second.directory
    assert (first.vocab_size, second.vocab_size) == (300, 320)


def test_a_failed_conversion_leaves_nothing_and_says_why(tmp_path: Path, cache: Path) -> None:
    file = GgufFile()
    file.tensors["blk.0.attn_q.bias"] = file.tensors["output_norm.weight"]
    path = file.write(tmp_path / "bias.gguf")
    with pytest.raises(ModelNotSupportedError, match=r"bias\.gguf cannot be converted.*blk\.0\.attn_q\.bias"):
        resolve(path)
    assert list((cache / "converted").iterdir()) == []


def test_a_crashed_conversion_is_reported(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = GgufFile().write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelSourceError, match=r"convert_gguf failed with exit code 1"):
        resolve(path)
    assert list((cache / "converted").iterdir()) == []


def test_two_at_a_time_both_succeed(tmp_path: Path, cache: Path) -> None:
    path = GgufFile().write(tmp_path / "tiny.gguf")
    found: list[ResolvedModel] = []
    threads = [threading.Thread(target=lambda: found.append(resolve(path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(list((cache / "converted").iterdir())) == 1


async def test_cancelling_kills_the_conversion(tmp_path: Path, cache: Path) -> None:
    path = GgufFile().write(tmp_path / "tiny.gguf")
    started = trio.Event()

    class Signalling(SilentProgress):
        def note(self, message: str) -> None:
            trio.from_thread.run_sync(started.set)

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def run() -> None:
            await trio.to_thread.run_sync(resolve_model, model_config(path), Signalling())
            raise AssertionError("it was not cancelled")

        await started.wait()
        nursery.cancel_scope.cancel()
    assert list((cache / "converted").iterdir()) == []


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    for model in ("smollm2-135m", "~no-such-user/model"):
        with pytest.raises(ModelSourceError, match="determine home directory"):
            resolve_model(model_config(model), SilentProgress())


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = GgufFile().write(tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file where the cache should be")
    with pytest.raises(ModelSourceError, match=r"Cannot make .* ready"):
        resolve(path)


def test_resolving_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = GgufFile().write(tmp_path / "tiny.gguf")
    program = (
        "import sys\n"
        "from trioserve.args import EngineArgs\n"
        "from trioserve.model_sources import resolve_model\n"
        "print(resolve_model(EngineArgs(model=sys.argv[1]).create_engine_config().model).architecture)\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["LlamaForCausalLM", "[]"]


# The cache


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_root() == tmp_path / ".cache" / "trioserve"


def test_a_directory_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "entry"

    def fail_halfway() -> None:
        with publish_directory(target) as partial:
            (partial / "half").write_text("")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []

    with publish_directory(target) as partial:
        (partial / "a").write_text("first")
        assert not target.exists()
    assert (target / "a").read_text() == "first"


def test_the_first_to_publish_wins(tmp_path: Path) -> None:
    target = tmp_path / "entry"
    with publish_directory(target) as slow:
        (slow / "a").write_text("slow")
        with publish_directory(target) as fast:
            (fast / "a").write_text("fast")
    assert (target / "a").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_what_a_killed_process_left_is_swept_later(tmp_path: Path) -> None:
    leftovers = [tmp_path / ".partial-old", tmp_path / ".partial-new"]
    for leftover in leftovers:
        leftover.mkdir()
        (leftover / "half").write_text("")
    os.utime(leftovers[0], (0, 0))
    with publish_directory(tmp_path / "entry"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-new", "entry"]


# Helper processes


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_helper_dies_with_its_parent() -> None:
    program = (
        "from trioserve.model_sources.helper_process import call_helper\n"
        "call_helper('helper_that_waits', {}, shows_progress=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, env=environment) as parent:
        assert parent.stderr is not None
        helper = int(parent.stderr.readline())
        os.kill(helper, 0)
        parent.kill()
        assert parent.stderr.read() == b""  # ends when the helper, too, has let go of it


def test_a_helper_that_is_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    with pytest.raises(ModelSourceError, match="helper_that_waits was killed by SIGKILL"):
        call_helper("helper_that_waits", {"kill": True})
