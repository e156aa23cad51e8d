"""How much memory a model's weights take. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trioserve.worker.checkpoint import BLOCK_SIZES, Blocks, open_checkpoint

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel
    from trioserve.worker.checkpoint import Stored

__all__ = ["weights_size"]

_BYTES: Final = {"bfloat16": 2, "float32": 4}
_LIKE: Final = {"int8": "Q8_0", "int4": "Q4_1"}
"""The blocks that take as much as a matrix that is quantized when it is loaded."""
_TABLES: Final = ("model.embed_tokens.weight", "lm_head.weight")
"""Four bits are too few for them: int4 has them in eight."""


def weights_size(model: ResolvedModel) -> int:
    """Bytes, in the precision in which it is served; without what the kernels pad matrices with.

    Raises:
      ModelNotSupportedError: a tensor is in blocks that are not supported.
      ModelSourceError: a file is missing or damaged.
    """
    with open_checkpoint(Path(model.directory)) as checkpoint:
        return sum(_size(name, checkpoint.read(name), model) for name in checkpoint.names)


def _size(name: str, stored: Stored, model: ResolvedModel) -> int:
    if isinstance(stored, Blocks) and model.serves_blocks:
        return stored.data.nbytes
    count = math.prod(stored.shape)
    if model.quantization in _LIKE and len(stored.shape) > 1:
        numbers, size = BLOCK_SIZES[_LIKE["int8" if name in _TABLES else model.quantization]]
        return -(-count // numbers) * size
    return count * _BYTES[model.dtype]
