"""The tensors of a directory in Hugging Face layout: dense ones, and matrices in GGUF's blocks. Imports no
torch."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np

from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.worker.tensor_file import StoredTensor, TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

__all__ = ["BLOCK_SIZES", "Blocks", "Checkpoint", "Stored", "check_names", "open_checkpoint", "read_config"]

BLOCK_SIZES = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Name of a kind of GGUF blocks -> numbers in a block, and its bytes."""

_DEQUANTIZED_AT_ONCE = 1 << 20
"""Numbers."""

_MAX_NAMED = 5
"""Tensors that an error names; a wrong architecture would name hundreds."""


@attrs.frozen(eq=False)
class Blocks:
    """A matrix whose rows are quantized in blocks of neighbouring columns, as a GGUF file has them."""

    kind: str
    """A key of `BLOCK_SIZES`."""
    data: np.ndarray
    """uint8 [rows, bytes per row]."""

    @property
    def shape(self) -> tuple[int, ...]:
        numbers, size = BLOCK_SIZES[self.kind]
        return len(self.data), self.data.shape[1] // size * numbers

    def dequantized(self) -> Iterator[tuple[int, np.ndarray]]:
        """The numbers that they stand for: a first row, and fp32 [some rows, columns] from there on.

        A few rows at a time, since fp32 copies of a whole matrix would take several times its memory.
        """
        from gguf import GGMLQuantizationType  # noqa: PLC0415 - few models need it, and it takes a while
        from gguf.quants import dequantize  # noqa: PLC0415

        kind = GGMLQuantizationType[self.kind]
        rows, columns = self.shape
        step = max(1, _DEQUANTIZED_AT_ONCE // columns)
        for start in range(0, rows, step):
            yield start, dequantize(self.data[start : start + step], kind)


Stored: TypeAlias = StoredTensor | Blocks


class Checkpoint:
    """Reads tensors by name; made by `open_checkpoint`, and usable as long as that is open.

    What it gives lies in mapped files: it costs memory only while it is read.
    """

    def __init__(self, files: dict[str, tuple[Path, TensorFile]]) -> None:
        """files: name of a tensor -> the path of its file, and the open file."""
        self._files = files

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def get(self, name: str, shape: Sequence[int]) -> Stored:
        """A tensor of floats of this shape, or blocks that stand for one.

        Raises:
          ModelNotSupportedError: it is something else.
          ModelSourceError: its file is damaged.
        """
        stored = self.read(name)
        if tuple(stored.shape) != tuple(shape):
            raise ModelNotSupportedError(
                f"The checkpoint's {name} has shape {tuple(stored.shape)}, "
                f"config.json asks for {tuple(shape)}."
            )
        if not isinstance(stored, Blocks) and not stored.is_floating_point:
            raise ModelNotSupportedError(
                f"The checkpoint's {name} is {stored.dtype}; of quantized weights, only GGUF's are supported."
            )
        return stored

    def read(self, name: str) -> Stored:
        """A tensor, whatever it is. Raises as `get`."""
        path, file = self._files[name]
        with _reading(path):
            tensor = file.read(name)
        kind = file.metadata.get(name)
        return tensor if kind is None else _blocks(name, kind, tensor)


@contextmanager
def open_checkpoint(directory: Path) -> Iterator[Checkpoint]:
    """Map the shards that the index names, or the one file; a directory may hold others beside them.

    Raises:
      ModelSourceError: a file is missing or damaged.
    """
    with ExitStack() as stack:
        files: dict[str, tuple[Path, TensorFile]] = {}
        for path in _paths(directory):
            with _reading(path):
                file = stack.enter_context(TensorFile(path))
                files |= dict.fromkeys(file.names, (path, file))
        yield Checkpoint(files)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} cannot be read: {error}") from error


def _blocks(name: str, kind: str, tensor: StoredTensor) -> Blocks:
    numbers_and_size = BLOCK_SIZES.get(kind)
    if numbers_and_size is None:
        raise ModelNotSupportedError(
            f"The checkpoint's {name} is in blocks of kind {kind}; supported: {', '.join(BLOCK_SIZES)}."
        )
    is_fitting = tensor.dtype == "uint8" and len(tensor.shape) == 2
    if not is_fitting or tensor.shape[1] % numbers_and_size[1]:
        raise ModelNotSupportedError(
            f"The checkpoint's {name} must be bytes, [rows, a multiple of {numbers_and_size[1]}], "
            f"got {tensor.dtype} {tensor.shape}."
        )
    return Blocks(kind, tensor.data)


def _paths(directory: Path) -> list[Path]:
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


def read_config(directory: Path) -> dict[str, object]:
    """The contents of config.json.

    Raises:
      ModelSourceError: it is missing or damaged.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelSourceError(f"{path} does not hold a JSON object.")
    return config


def check_names(
    found: Collection[str], needed: Collection[str], *, is_redundant: Callable[[str], bool]
) -> None:
    """A checkpoint holds what a model needs, and nothing that it has no use for.

    Raises:
      ModelNotSupportedError: it does not; names the first few of what is missing or too much.
    """
    if lacking := [name for name in needed if name not in found]:
        raise ModelNotSupportedError(f"The checkpoint lacks {_list(lacking)}.")
    if unknown := [name for name in found if name not in needed and not is_redundant(name)]:
        raise ModelNotSupportedError(
            f"The checkpoint has tensors that the model has no use for: {_list(unknown)}."
        )


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"
