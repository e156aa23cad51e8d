"""The building blocks of the decoders.

They are plain objects, not `nn.Module`s: all they need is memory that a checkpoint fills, and a call. Each
has `weights(prefix)`: checkpoint name -> the memory that this tensor fills.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import trioserve_kernels.reference as kernels

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Embedding", "Linear", "RMSNorm"]


class Linear:
    """x W^T + b, for one matrix or for several that share their input, stacked into one product.

    Args:
      in_features: numbers per row of x.
      parts: checkpoint name -> rows, in the order in which they are stacked.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        out_features = sum(parts.values())
        self._weight = torch.empty(out_features, in_features, dtype=dtype)
        self._bias = torch.empty(out_features, dtype=dtype) if bias else None
        self._parts = dict(parts)
        self._packed = False
        """True: `_weight` is opaque, in oneDNN's layout."""

    @classmethod
    def tied(cls, weight: torch.Tensor) -> Linear:
        """A product with a matrix [out_features, in_features] that another layer owns; nothing to fill."""
        linear = cls(weight.shape[1], {}, bias=False, dtype=weight.dtype)
        linear._weight = weight
        return linear

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        found = {}
        start = 0
        for name, rows in self._parts.items():
            found[f"{prefix}{name}.weight"] = self._weight[start : start + rows]
            if self._bias is not None:
                found[f"{prefix}{name}.bias"] = self._bias[start : start + rows]
            start += rows
        return found

    def pack(self) -> None:
        """Reorder the filled matrix for oneDNN, which saves it from doing so in every call.

        A third faster in bf16 (28 us against 51 for 960 x 576). fp32 stays as it is: MKL gains nothing.
        """
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
        if self._weight.dtype is torch.bfloat16 and has_onednn:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight)
            self._packed = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]."""
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return product
        return torch.nn.functional.linear(x, self._weight, self._bias)


class Embedding:
    """A row of numbers per token id, times `scale`, which is rounded to the dtype first."""

    def __init__(self, num_rows: int, width: int, *, scale: float, dtype: torch.dtype) -> None:
        self.weight = torch.empty(num_rows, width, dtype=dtype)
        self._scale = torch.tensor(scale, dtype=dtype).item()

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}weight": self.weight}

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, width]."""
        rows = torch.nn.functional.embedding(token_ids, self.weight)
        return rows if self._scale == 1.0 else rows * self._scale


class RMSNorm:
    """`trioserve_kernels.reference.rms_norm` with its weight, to which `offset` is added."""

    def __init__(self, width: int, epsilon: float, *, offset: float, dtype: torch.dtype) -> None:
        self._weight = torch.empty(width, dtype=dtype)
        self._epsilon = epsilon
        self._offset = offset
        self._scale = torch.empty(0)
        """Offset and weight, once packed: fp32, since 1 + weight has no room in bfloat16."""

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}weight": self._weight}

    def pack(self) -> None:
        self._scale = self._weight.float() + self._offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        return kernels.rms_norm(x, self._scale, self._epsilon)
