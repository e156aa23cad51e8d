"""Adapters whose files are wrong, or change while they are read: an error, and never the engine's end."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hash_engine import open_hash_llm
from helpers_lora import adapter_json, random_tensors, save_adapter, tensor_name
from helpers_worker import engine_config, resolved, tiny_llama
from trioserve import InvalidRequestError, LoRARequest, SamplingParams
from trioserve.errors import LoRANotFoundError, ModelNotSupportedError, ModelSourceError
from trioserve.worker.lora import make_adapter
from trioserve.worker.lora_files import read_adapter
from trioserve.worker.model_runner import ModelRunner
from trioserve.worker.regular_files import read_regular_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trioserve.models.config import DecoderConfig

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def theirs() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def runner(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    directory = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(directory)
    runner = ModelRunner(resolved(directory), engine_config(enable_lora=True))
    yield runner
    runner.close()


@pytest.fixture
def decoder(runner: ModelRunner) -> DecoderConfig:
    return runner._decoder


def adapter_of(theirs: Any, directory: Path, changed: dict[str, Any], **changes: Any) -> Path:
    """`changed`: (matrix of the first q_proj) -> what becomes of it."""
    tensors = random_tensors(theirs)
    for matrix, change in changed.items():
        name = tensor_name(Q_PROJ, matrix)
        tensors[name] = change(tensors[name])
    return save_adapter(directory / "a", tensors, adapter_json(**changes))


def with_first(value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0, 0] = value
        return tensor

    return change


@pytest.mark.parametrize("matrix", ["A", "B"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(
    matrix: str, value: float, theirs: Any, runner: ModelRunner, tmp_path: Path
) -> None:
    directory = adapter_of(theirs, tmp_path, {matrix: with_first(value)})
    with pytest.raises(ModelNotSupportedError, match=r"must be finite as .*, those of layer 0's q_proj"):
        runner.add_adapter("a", runner.read_adapter(str(directory)))


@pytest.mark.parametrize(
    ("changed", "changes"),
    [
        ({"A": with_first(1e5)}, {}),
        ({"B": with_first(60_000.0)}, {"lora_alpha": 12}),  # times 3
        ({}, {"lora_alpha": 1e9}),
    ],
)
def test_values_that_the_models_type_has_not(
    changed: dict[str, Any], changes: dict[str, Any], theirs: Any, decoder: DecoderConfig, tmp_path: Path
) -> None:
    file = read_adapter(adapter_of(theirs, tmp_path, changed, **changes), decoder, max_rank=16)
    make_adapter(file, decoder, torch.float32)
    with pytest.raises(ModelNotSupportedError, match=r"must be finite as torch\.float16"):
        make_adapter(file, decoder, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16])
def test_types_that_are_no_usual_floats(
    dtype: torch.dtype, theirs: Any, decoder: DecoderConfig, tmp_path: Path
) -> None:
    directory = adapter_of(theirs, tmp_path, {"A": lambda tensor: tensor.to(dtype)})
    with pytest.raises(
        ModelNotSupportedError, match=f"must be floating-point, of 16 to 64 bits, got {dtype}"
    ):
        read_adapter(directory, decoder, max_rank=16)


def test_a_type_that_is_unknown(decoder: DecoderConfig, tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}).encode()
    directory = save_adapter(tmp_path / "a", {}, adapter_json())
    content = struct.pack("<Q", len(header)) + header + bytes(2)
    (directory / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ModelNotSupportedError, match="must not be of type 'F4'"):
        read_adapter(directory, decoder, max_rank=16)


def test_pickled_weights_are_not_looked_at(theirs: Any, decoder: DecoderConfig, tmp_path: Path) -> None:
    directory = adapter_of(theirs, tmp_path, {})
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(LoRANotFoundError, match=r"it has no adapter_model\.safetensors"):
        read_adapter(directory, decoder, max_rank=16)


def test_files_that_are_too_large(theirs: Any, decoder: DecoderConfig, tmp_path: Path) -> None:
    """Not even read: they have no bytes on the disk, and would take gibibytes in memory."""
    directory = adapter_of(theirs, tmp_path, {})
    os.truncate(directory / "adapter_model.safetensors", 2**40)
    with pytest.raises(ModelSourceError, match=r"safetensors cannot be read: .* more than \d+ bytes"):
        read_adapter(directory, decoder, max_rank=16)
    os.truncate(directory / "adapter_config.json", 2**40)
    with pytest.raises(ModelSourceError, match=r"config\.json cannot be read: .* more than 1048576 bytes"):
        read_adapter(directory, decoder, max_rank=16)


@pytest.mark.parametrize("path", ["x" * 300, "loop", "file/below"])
def test_paths_that_lead_nowhere(path: str, decoder: DecoderConfig, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(LoRANotFoundError, match="There is no LoRA adapter in"):
        read_adapter(tmp_path / path, decoder, max_rank=16)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_regular_file(tmp_path / "pipe", max_bytes=10)
    with pytest.raises(IsADirectoryError):
        read_regular_file(tmp_path, max_bytes=2**30)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_regular_file(tmp_path / "file", max_bytes=10) == b"0123456789"
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_regular_file(tmp_path / "file", max_bytes=9)
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_regular_file(tmp_path.joinpath("/proc/self/status"), max_bytes=9)  # it tells a size of 0


def test_a_file_that_is_cut_short_after_it_was_read(theirs: Any, runner: ModelRunner, tmp_path: Path) -> None:
    """Whoever maps it is ended by a signal."""
    directory = adapter_of(theirs, tmp_path, {})
    file = runner.read_adapter(str(directory))
    os.truncate(directory / "adapter_model.safetensors", 0)
    runner.add_adapter("a", file)
    runner.remove_adapter("a")


@pytest.mark.parametrize("method", ["read_adapter", "add_adapter"])
async def test_an_engine_outlives_whatever_a_file_makes_of_its_reader(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_hash_llm(tmp_path, monkeypatch, enable_lora=True) as engine:

        def fail(*_: object) -> None:
            raise MemoryError("so large")

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, method, fail)
            with pytest.raises(InvalidRequestError, match="cannot be loaded: MemoryError"):
                await engine.llm.load_lora(LoRARequest("a", 1, "1"))
        await engine.llm.load_lora(LoRARequest("a", 1, "1"))
        await engine.llm.complete("Hi", SamplingParams(max_tokens=1), lora_request=LoRARequest("a"))
