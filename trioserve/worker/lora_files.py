"""From an adapter's directory, in PEFT's layout, to its matrices."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import safetensors.torch
import torch

from trioserve.errors import LoRANotFoundError, ModelNotSupportedError, ModelSourceError
from trioserve.models.products import Product, products
from trioserve.worker.lora_config import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from trioserve.worker.regular_files import read_regular_file

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.models.config import DecoderConfig
    from trioserve.worker.lora_config import AdapterConfig

__all__ = ["AdapterFile", "LowRank", "read_adapter"]

_NAME = re.compile(
    r"base_model\.model\.(?P<module>model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<parent>\w+)\.(?P<part>\w+))"
    r"\.lora_(?P<matrix>[AB])\.weight"
)


@attrs.frozen(eq=False)
class LowRank:
    """scale * B A, to be added to a matrix [out_features, in_features]."""

    a: torch.Tensor
    """[rank, in_features], of whatever floating-point type the file has."""
    b: torch.Tensor
    """[out_features, rank]."""
    scale: float


_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_MAX_HEADER_BYTES = 10**8
"""What the format allows."""

AdapterFile = Mapping[tuple[int, str], LowRank]
"""(layer, name of one of the `Product.parts`) -> what is added to this matrix."""


def read_adapter(directory: Path, model: DecoderConfig, *, max_rank: int) -> AdapterFile:
    """Read and check it all, but for the values. Blocks for as long as the disk takes; computes nothing.

    Raises:
      LoRANotFoundError: there is no adapter in this directory.
      ModelSourceError: it is damaged.
      ModelNotSupportedError: it is no plain LoRA adapter, not one of this model, or its rank is too high.
    """
    for name in ADAPTER_FILES:
        if not os.path.isfile(directory / name):  # a Path's own method raises where it may not look
            raise LoRANotFoundError(f"There is no LoRA adapter in {directory}: it has no {name}.")
    config = read_adapter_config(directory / CONFIG_FILE)
    tensors = _read_tensors(directory / WEIGHTS_FILE, _max_bytes(model, max_rank))
    matrices = _Matrices(tensors, model, config, max_rank)
    return {place: matrices.get(*place) for place in sorted(matrices.places)}


def _max_bytes(model: DecoderConfig, max_rank: int) -> int:
    """No file of a fitting adapter has more, whatever type its matrices have."""
    widths = sum(
        product.in_features + rows for product in products(model).values() for rows in product.parts.values()
    )
    return _MAX_HEADER_BYTES + model.num_layers * max_rank * widths * torch.float64.itemsize


def _read_tensors(path: Path, max_bytes: int) -> Mapping[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(
            read_regular_file(path, max_bytes=max_bytes)
        )
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelSourceError(f"{path} cannot be read: {error}") from error
    except KeyError as error:  # a type that torch has not
        raise ModelNotSupportedError(f"The adapter's matrices must not be of type {error}.") from error
    return tensors


class _Matrices:
    """The tensors of a file, checked to be those of an adapter of this model."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        model: DecoderConfig,
        config: AdapterConfig,
        max_rank: int,
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._max_rank = max_rank
        self._parts: dict[str, tuple[Product, int]] = {
            part: (product, rows)
            for product in products(model).values()
            for part, rows in product.parts.items()
        }
        self._names: dict[tuple[int, str, str], str] = {}
        self._modules: dict[tuple[int, str], str] = {}
        for name in sorted(tensors):
            self._note(name, model.num_layers)
        if not self._names:
            raise ModelSourceError("The adapter has no matrices.")
        for place in self._modules:
            self._check(*place)

    @property
    def places(self) -> set[tuple[int, str]]:
        return set(self._modules)

    def _note(self, name: str, num_layers: int) -> None:
        match = _NAME.fullmatch(name)
        part = None if match is None else match["part"]
        if (
            match is None
            or part not in self._parts
            or self._parts[part][0].parent != match["parent"]
            or int(match["layer"]) >= num_layers
        ):
            raise ModelNotSupportedError(
                f"The adapter's tensor {name!r} is for no matrix that adapters of this model may change: "
                f"{', '.join(self._parts)} of {num_layers} layers."
            )
        place = int(match["layer"]), part
        self._names[*place, match["matrix"]] = name
        self._modules[place] = match["module"]

    def _check(self, layer: int, part: str) -> None:
        module = self._modules[layer, part]
        rank = self._config.rank(module)
        if rank > self._max_rank:
            raise ModelNotSupportedError(
                f"The adapter's rank must be at most max_lora_rank={self._max_rank}, got {rank} of {module}."
            )
        product, rows = self._parts[part]
        for matrix, expected in (("A", [rank, product.in_features]), ("B", [rows, rank])):
            name = self._names.get((layer, part, matrix))
            if name is None:
                raise ModelSourceError(f"The adapter has only one of {module}'s two matrices.")
            tensor = self._tensors[name]
            if (shape := list(tensor.shape)) != expected:
                raise ModelNotSupportedError(
                    f"The adapter's {name} has shape {shape}, this model and its rank ask for {expected}."
                )
            if tensor.dtype not in _FLOATS:
                raise ModelNotSupportedError(
                    f"The adapter's matrices must be floating-point, of 16 to 64 bits, got {tensor.dtype}."
                )

    def get(self, layer: int, part: str) -> LowRank:
        a, b = (self._tensors[self._names[layer, part, matrix]] for matrix in "AB")
        return LowRank(a, b, self._config.scale(self._modules[layer, part]))
