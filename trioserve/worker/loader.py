"""From a directory in Hugging Face layout to a model that computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import torch

from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.models.registry import load_class

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel
    from trioserve.models.decoder import DecoderModel

__all__ = ["load_model"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_NAMED = 5
"""Tensors that an error names; a wrong architecture would name hundreds."""


def load_model(model: ResolvedModel) -> DecoderModel:
    """Read config.json and every *.safetensors file of `model.directory`.

    The files are mapped into memory and each tensor is converted to `model.dtype` straight into the
    parameter it fills, so that the peak is one copy of the model in that dtype.

    Raises:
      ModelNotSupportedError: no native implementation, or one that does not fit the checkpoint's tensors.
      ModelSourceError: a file is missing or damaged.
    """
    directory = Path(model.directory)
    model_class = load_class(model.architecture)
    loaded = model_class(_read_config(directory), _DTYPES[model.dtype])
    _fill(loaded, _checkpoint_files(directory))
    loaded.pack()
    return loaded


def _read_config(directory: Path) -> dict[str, object]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelSourceError(f"{path} does not hold a JSON object.")
    return config


def _checkpoint_files(directory: Path) -> list[Path]:
    """The shards that the index names, or the one file; a directory may hold others beside them."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        files = [directory / "model.safetensors"]
    else:
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelSourceError(f"{index} is damaged: {error!r}") from error
        files = [directory / name for name in sorted(names)]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise ModelSourceError(f"Missing weight files: {', '.join(missing)}.")
    return files


def _fill(model: DecoderModel, files: list[Path]) -> None:
    """Every tensor of the files into its parameter; strict in both directions."""
    unfilled = model.weights()
    unknown = []
    for path in files:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a dict: it cannot be iterated
                    if name in unfilled:
                        _copy(name, file.get_tensor(name), unfilled.pop(name))
                    elif not model.is_redundant(name):
                        unknown.append(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelSourceError(f"{path} cannot be read: {error}") from error
    if unfilled:
        raise ModelNotSupportedError(f"The checkpoint lacks {_list(list(unfilled))}.")
    if unknown:
        raise ModelNotSupportedError(
            f"The checkpoint has tensors that the model has no use for: {_list(unknown)}."
        )


def _copy(name: str, source: torch.Tensor, target: torch.Tensor) -> None:
    if source.shape != target.shape:
        raise ModelNotSupportedError(
            f"The checkpoint's {name} has shape {tuple(source.shape)}, "
            f"config.json asks for {tuple(target.shape)}."
        )
    if not source.is_floating_point():
        raise ModelNotSupportedError(
            f"The checkpoint's {name} is {source.dtype}; quantized weights are not supported."
        )
    target.copy_(source)


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"
