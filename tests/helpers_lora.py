"""Adapters as PEFT writes them, and the models that they make of a model."""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    import transformers

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_json(**changes: object) -> dict[str, Any]:
    """adapter_config.json, with keys that do not matter here as well."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": 4,
        "lora_alpha": 12,
        "lora_dropout": 0.05,
        "target_modules": list(ALL),
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    } | changes


def save_adapter(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(dict(tensors), directory / "adapter_model.safetensors")
    return directory


def tensor_name(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def random_tensors(
    model: transformers.PreTrainedModel,
    *,
    rank: int = 4,
    ranks: Mapping[str, int] | None = None,
    targets: Collection[str] = ALL,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """ranks: by the last part of a module's name, where they are not `rank`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, layer in model.named_modules():
        name = module.rpartition(".")[2]
        if name in targets:
            out_features, in_features = layer.weight.shape
            own = (ranks or {}).get(name, rank)
            for matrix, shape in (("A", (own, in_features)), ("B", (out_features, own))):
                tensors[tensor_name(module, matrix)] = 0.2 * torch.randn(shape, generator=generator)
    return tensors


def merged(
    model: transformers.PreTrainedModel, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> transformers.PreTrainedModel:
    """A copy whose weights are W + scale B A, by PEFT's documentation."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module, layer in model.named_modules():
            if (a := tensors.get(tensor_name(module, "A"))) is None:
                continue
            b = tensors[tensor_name(module, "B")]
            name = module.rpartition(".")[2]
            alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
            layer.weight += scale * b @ a
    return model


def save_random_adapter(
    directory: Path, model: transformers.PreTrainedModel, *, seed: int = 1, **changes: object
) -> transformers.PreTrainedModel:
    """Saves one for this model, and returns what the two make together."""
    config = adapter_json(**changes)
    tensors = random_tensors(model, rank=config["r"], ranks=config["rank_pattern"], seed=seed)
    save_adapter(directory, tensors, config)
    return merged(model, tensors, config)
