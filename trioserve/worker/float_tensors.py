"""Tensors of a checkpoint as float32. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.errors import ModelNotSupportedError
from trioserve.worker.checkpoint import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from trioserve.worker.checkpoint import Checkpoint

__all__ = ["read_floats"]


def read_floats(checkpoint: Checkpoint, name: str, shape: Sequence[int]) -> np.ndarray:
    """A copy, float32 of this shape.

    Raises:
      ModelNotSupportedError: it is not there, has another shape, or is quantized.
      ModelSourceError: its file is damaged.
    """
    if name not in checkpoint.names:
        raise ModelNotSupportedError(f"The checkpoint lacks {name}.")
    stored = checkpoint.get(name, shape)
    if isinstance(stored, Blocks):
        raise ModelNotSupportedError(f"The checkpoint's {name} is quantized; models that pool must not be.")
    return stored.to_float32()
