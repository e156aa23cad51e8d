"""From a directory in Hugging Face layout to a model that torch computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trioserve.models.registry import load_class
from trioserve.worker.checkpoint import Blocks, check_names, open_checkpoint, read_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trioserve.config import ResolvedModel
    from trioserve.models.decoder import DecoderModel
    from trioserve.worker.tensor_file import StoredTensor

__all__ = ["TORCH_DTYPES", "fill", "load_model"]

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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
    loaded = model_class(read_config(directory), TORCH_DTYPES[model.dtype])
    fill(loaded.weights(), directory, is_redundant=loaded.is_redundant)
    loaded.pack()
    return loaded


def fill(
    parameters: Mapping[str, torch.Tensor], directory: Path, *, is_redundant: Callable[[str], bool]
) -> None:
    """Every tensor of the directory's files into its parameter; strict in both directions.

    Raises:
      ModelNotSupportedError: names or shapes differ.
      ModelSourceError: a file is missing or damaged.
    """
    with open_checkpoint(directory) as checkpoint:
        check_names(checkpoint.names, parameters, is_redundant=is_redundant)
        for name, parameter in parameters.items():
            stored = checkpoint.get(name, parameter.shape)
            if isinstance(stored, Blocks):
                for start, numbers in stored.dequantized():
                    parameter[start : start + len(numbers)] = torch.from_numpy(numbers)
            else:
                parameter.copy_(_tensor(stored))


def _tensor(stored: StoredTensor) -> torch.Tensor:
    """In the same memory."""
    return torch.from_numpy(stored.data).view(getattr(torch, stored.dtype))
