"""The gated MLP of a decoder layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trioserve_kernels.reference as kernels
from trioserve.models.layers import Linear

if TYPE_CHECKING:
    import torch

    from trioserve.models.config import DecoderConfig

__all__ = ["GatedMLP"]

_ACTIVATIONS = {"silu": kernels.silu_and_mul, "gelu_tanh": kernels.gelu_tanh_and_mul}


class GatedMLP:
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._gate_up = Linear(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias, dtype=dtype
        )
        self._down = Linear(inner, {"down_proj": hidden}, bias=config.mlp_bias, dtype=dtype)
        self._activate_and_multiply = _ACTIVATIONS[config.activation]

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        return self._gate_up.weights(prefix) | self._down.weights(prefix)

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activate_and_multiply(self._gate_up(x)))
