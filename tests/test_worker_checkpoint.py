"""Matrices in GGUF's blocks beside dense tensors, as torch loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers_native import put_in_blocks, random_blocks
from helpers_worker import resolved, tiny_llama
from trioserve.errors import ModelNotSupportedError
from trioserve.worker.checkpoint import BLOCK_SIZES
from trioserve.worker.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Its matrices have rows of 256, at least."""
    tiny_llama(hidden_size=256, intermediate_size=512, num_hidden_layers=2).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", BLOCK_SIZES)
@pytest.mark.parametrize("numbers_at_once", [1000, 10**9])
def test_torch_loads_what_blocks_mean(
    checkpoint: Path, kind: str, numbers_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.worker.checkpoint._DEQUANTIZED_AT_ONCE", numbers_at_once)
    put_in_blocks(checkpoint, {"down_proj": kind})
    blocks = load_file(checkpoint / "model.safetensors")[DOWN]
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))
    for dtype, torch_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        loaded = load_model(resolved(checkpoint, dtype=dtype))  # type: ignore[arg-type]
        if torch_dtype is torch.float32:  # bf16 matrices are packed once they are filled
            assert torch.equal(loaded.weights()[DOWN], expected)
        assert loaded.dtype is torch_dtype


def _store(directory: Path, kind: str, data: torch.Tensor) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | {DOWN: data}
    path.unlink()
    save_file(tensors, path, metadata={DOWN: kind})


def test_blocks_of_another_shape_are_named(checkpoint: Path) -> None:
    _store(checkpoint, "Q8_0", torch.from_numpy(random_blocks("Q8_0", 256, 256)))
    with pytest.raises(ModelNotSupportedError, match=r"down_proj.*\(256, 256\).*\(256, 512\)"):
        load_model(resolved(checkpoint))


@pytest.mark.parametrize(
    ("kind", "data", "complaint"),
    [
        ("Q5_K", torch.zeros(256, 352, dtype=torch.uint8), "kind Q5_K; supported: Q8_0, "),
        ("Q8_0", torch.zeros(256, 543, dtype=torch.uint8), r"a multiple of 34.*uint8 \(256, 543\)"),
        ("Q8_0", torch.zeros(256, 544), "float32"),
        ("Q8_0", torch.zeros(544, dtype=torch.uint8), r"\(544,\)"),
    ],
)
def test_what_are_no_blocks_is_named(checkpoint: Path, kind: str, data: torch.Tensor, complaint: str) -> None:
    _store(checkpoint, kind, data)
    with pytest.raises(ModelNotSupportedError, match=complaint) as caught:
        load_model(resolved(checkpoint))
    assert DOWN in str(caught.value)
