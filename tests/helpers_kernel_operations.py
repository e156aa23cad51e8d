"""Single operations of the CPU engine (kernels/cpu/testing.h), called on numpy arrays."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from trioserve_kernels.native import load

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ELEMENTS", "FP32", "RAGGED_SIZES", "Operations", "as_elements", "floats", "widened"]

FP32, BF16 = 0, 1
ELEMENTS = {"fp32": (FP32, np.float32, 3e-7), "bf16": (BF16, np.uint16, 2**-8 * 1.001)}
"""Number, dtype, and how far a result may be off, relative: half a unit in the last place, and a hair for
fp32's own rounding."""

RAGGED_SIZES = [1, 2, 15, 16, 17, 31, 33, 64, 80, 100, 256, 576]

_EACH = (
    *("exp", "exp2", "tanh", "exp_coarse", "exp2_upto_0", "reciprocal_coarse", "round", "abs"),
    *("swap_halves", "low_halves", "high_halves"),
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "copysign"),
)


class Operations:
    """A tier's `ts_test_` functions. Arrays go in by their addresses."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self._functions = load(tier).functions
        for name in ("sum", "highest"):
            getattr(self._functions, f"ts_test_{name}").restype = ctypes.c_float

    def __call__(self, name: str, *arguments: NDArray[np.generic] | float | None) -> float:
        function = getattr(self._functions, f"ts_test_{name}")
        return float(function(*map(_as_argument, arguments)) or 0)

    def each(
        self, name: str, a: NDArray[np.float32], b: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """A function of sixteen floats, over as many as there are."""
        out = np.full_like(a, np.nan)
        self("each", _EACH.index(name), a, b, a.size, out)
        return out


def _as_argument(value: NDArray[np.generic] | float | None) -> object:
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_float(value) if isinstance(value, float) else value


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def as_elements(values: NDArray[np.float32], element: str) -> NDArray[np.generic]:
    """Floats, or the bits of the bf16 values nearest to them."""
    if element == "fp32":
        return values.copy()
    bits: NDArray[np.uint16] = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy().copy()
    return bits


def widened(elements: NDArray[np.generic]) -> NDArray[np.float64]:
    """What `as_elements` gives, in float64."""
    if elements.dtype == np.uint16:
        elements = (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float64)
