"""Checkpoints on disk: whole, sharded, of another dtype, incomplete, overfull, misshapen, damaged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers_worker import TINY_LLAMA, resolved, tiny_llama
from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.worker.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def _change(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    (directory / "model.safetensors").unlink()
    save_file(kept, directory / "model.safetensors")


def test_every_parameter_is_the_checkpoints(checkpoint: Path) -> None:
    loaded = load_model(resolved(checkpoint)).weights()
    stored = load_file(checkpoint / "model.safetensors")
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_shards_load_as_one_file_does(checkpoint: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    tiny_llama().save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    save_file({"stray": torch.ones(1)}, sharded / "consolidated.safetensors")  # not in the index
    whole, parts = load_model(resolved(checkpoint)).weights(), load_model(resolved(sharded)).weights()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_weights_are_converted_to_the_serving_dtype(tmp_path: Path) -> None:
    tiny_llama().bfloat16().save_pretrained(tmp_path)
    loaded = load_model(resolved(tmp_path, dtype="float32")).weights()
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert loaded[name].dtype is torch.float32
    assert torch.equal(loaded[name], stored[name].float())


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    _change(checkpoint, **{"model.layers.1.self_attn.k_proj.weight": None})
    with pytest.raises(ModelNotSupportedError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(resolved(checkpoint))


def test_a_tensor_without_use_is_named(checkpoint: Path) -> None:
    _change(checkpoint, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(ModelNotSupportedError, match=r"no use.*q_norm"):
        load_model(resolved(checkpoint))


def test_a_wrong_shape_is_named(checkpoint: Path) -> None:
    _change(checkpoint, **{"model.norm.weight": torch.ones(31)})
    with pytest.raises(ModelNotSupportedError, match=r"model\.norm\.weight.*\(31,\).*\(32,\)"):
        load_model(resolved(checkpoint))


def test_quantized_weights_are_refused(checkpoint: Path) -> None:
    _change(checkpoint, **{"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(ModelNotSupportedError, match="quantized"):
        load_model(resolved(checkpoint))


def test_copies_and_stored_frequencies_are_skipped(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    _change(
        tmp_path,
        **{
            "lm_head.weight": torch.zeros(TINY_LLAMA["vocab_size"], 32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        },
    )
    assert "lm_head.weight" not in load_model(resolved(tmp_path)).weights()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", None),
        ("model.safetensors", b"12345678 and no more"),
        ("model.safetensors", None),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode()),
    ],
)
def test_damaged_and_missing_files_are_named(checkpoint: Path, name: str, content: bytes | None) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    if content is not None:
        (checkpoint / name).write_bytes(content)
    with pytest.raises(ModelSourceError, match=r"gone\.safetensors" if b"gone" in (content or b"") else name):
        load_model(resolved(checkpoint))
