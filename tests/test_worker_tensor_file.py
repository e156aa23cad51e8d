"""Files in the safetensors format: what their own library writes, and damaged ones."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trioserve.worker.tensor_file import TensorFile

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)], ids=str)
def test_tensors_are_those_that_were_stored(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    stored = (torch.randn(shape) * 100).abs().to(dtype)
    odd = torch.ones(3, dtype=torch.uint8)  # what comes after it may lie at any address
    save_file({"odd": odd, "x": stored}, tmp_path / "x.safetensors", metadata={"kind": "test"})
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert set(file.names) == {"odd", "x"}
        assert file.metadata == {"kind": "test"}
        tensor = file.read("x")
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(dtype), shape)
        assert tensor.is_floating_point == dtype.is_floating_point
        np.testing.assert_array_equal(tensor.to_float32(), stored.float().numpy())
        del tensor


def _write(path: Path, header: bytes, data: bytes = bytes(8), length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def _entry(**changes: Any) -> bytes:
    return json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}).encode()


@pytest.mark.parametrize(
    ("header", "length", "complaint"),
    [
        (b"{}", 1 << 60, "header should have"),
        (b"[]", None, "header is damaged"),
        (b'{"x": 1}', None, "header is damaged"),
        (_entry(shape=None), None, "header is damaged"),
        (_entry(dtype="F4"), None, "unknown dtype F4"),
        (_entry(shape=[3]), None, r"shape \(3,\), but bytes 0 to 8"),
        (_entry(shape=[-1, -2]), None, r"shape \(-1, -2\)"),
        (_entry(data_offsets=[-8, 0]), None, "bytes -8 to 0"),
        (_entry(data_offsets=[8, 16]), None, "ends at"),
    ],
)
def test_damage_is_described(tmp_path: Path, header: bytes, length: int | None, complaint: str) -> None:
    path = _write(tmp_path / "x.safetensors", header, length=length)
    with pytest.raises(ValueError, match=complaint), TensorFile(path) as file:
        file.read("x")


@pytest.mark.parametrize("size", [0, 7])
def test_short_files_are_no_tensors(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(ValueError, match=r"short|empty"):
        TensorFile(path)
