"""The gated MLP of a decoder layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trioserve_kernels.reference as kernels
from trioserve.models.layers import Linear
from trioserve.models.products import products

if TYPE_CHECKING:
    import torch

    from trioserve.models.config import DecoderConfig
    from trioserve.models.decoder import AdapterContext

__all__ = ["GatedMLP"]

_ACTIVATIONS = {"silu": kernels.silu_and_mul, "gelu_tanh": kernels.gelu_tanh_and_mul}


class GatedMLP:
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        self._layer = layer
        gate_up, down = products(config)["gate_up"], products(config)["down"]
        self._gate_up = Linear(gate_up.in_features, gate_up.parts, bias=config.mlp_bias, dtype=dtype)
        self._down = Linear(down.in_features, down.parts, bias=config.mlp_bias, dtype=dtype)
        self._activate_and_multiply = _ACTIVATIONS[config.activation]

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        return self._gate_up.weights(prefix) | self._down.weights(prefix)

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def __call__(self, x: torch.Tensor, adapters: AdapterContext | None) -> torch.Tensor:
        gate_up = self._gate_up(x)
        if adapters is not None:
            adapters.add(self._layer, "gate_up", x, gate_up)
        inner = self._activate_and_multiply(gate_up)
        output = self._down(inner)
        if adapters is not None:
            adapters.add(self._layer, "down", inner, output)
        return output
