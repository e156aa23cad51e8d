"""Whisper's encoder by the native kernels; convolutions are products with windows of three frames."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from trioserve.models.whisper_weights import cross_products
from trioserve_kernels.native import (
    EncoderLayer,
    EncoderShape,
    LinearWeights,
    NativeEncoder,
    NativeLinear,
    NormWeights,
    ThreadPool,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.models.config_whisper import WhisperConfig
    from trioserve_kernels.native import Library

__all__ = ["NativeHearing"]

_WINDOW = 3
_EPSILON = 1e-5


class NativeHearing:
    """See `trioserve.worker.whisper_executor.Hearing`.

    Owns `threads` threads, the caller's included, until `close`; and weights, from `load` to `free`.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self._closing = ExitStack()
        self._pool = self._closing.enter_context(ThreadPool(library, threads))
        self._loaded: _Loaded | None = None

    def load(self, config: WhisperConfig, weights: Mapping[str, NDArray[np.float32]]) -> None:
        """weights: of the whole checkpoint, by their names there; not needed any more afterwards."""
        self._loaded = _load(self._pool, config, weights)

    def hear(self, features: NDArray[np.float32]) -> torch.Tensor:
        assert self._loaded is not None, "the weights have been freed"
        x = features
        for stride, convolution in enumerate(self._loaded.convolutions, 1):
            x = _gelu(convolution(_windows(x, stride)))
        x += self._loaded.positions
        self._loaded.encoder.forward_in_place(x, [len(x)])
        return torch.from_numpy(self._loaded.keys_values(x))

    def free(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        self.free()
        self._closing.close()


@attrs.frozen(eq=False)
class _Loaded:
    convolutions: list[NativeLinear]
    positions: NDArray[np.float32]
    encoder: NativeEncoder
    keys_values: NativeLinear

    def close(self) -> None:
        self.encoder.close()
        for linear in (*self.convolutions, self.keys_values):
            linear.close()


def _windows(x: NDArray[np.float32], stride: int) -> NDArray[np.float32]:
    """[frames, width] -> [frames / stride, 3 * width]: each frame with its neighbours, zeros beyond the ends.

    Frames lie one behind the other, so a window is one piece of memory.
    """
    num_frames, width = x.shape
    padded = np.zeros((num_frames + 2, width), np.float32)
    padded[1:-1] = x
    pieces = np.lib.stride_tricks.sliding_window_view(padded.reshape(-1), _WINDOW * width)
    return np.ascontiguousarray(pieces[:: stride * width][: num_frames // stride])


def _gelu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    return found


def _load(pool: ThreadPool, config: WhisperConfig, weights: Mapping[str, NDArray[np.float32]]) -> _Loaded:
    def linear(name: str) -> LinearWeights:
        return LinearWeights(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str) -> NormWeights:
        return NormWeights(weights[f"{name}.weight"], weights[f"{name}.bias"])

    def layer(name: str) -> EncoderLayer:
        return EncoderLayer(
            query=linear(f"{name}.self_attn.q_proj"),
            key=linear(f"{name}.self_attn.k_proj"),
            value=linear(f"{name}.self_attn.v_proj"),
            output=linear(f"{name}.self_attn.out_proj"),
            attention_norm=norm(f"{name}.self_attn_layer_norm"),
            up=linear(f"{name}.fc1"),
            down=linear(f"{name}.fc2"),
            mlp_norm=norm(f"{name}.final_layer_norm"),
        )

    def convolution(name: str) -> NativeLinear:
        kernel = weights[f"{name}.weight"]  # [out, in, 3]
        matrix = np.ascontiguousarray(kernel.transpose(0, 2, 1).reshape(len(kernel), -1))
        return NativeLinear(pool, LinearWeights(matrix, weights[f"{name}.bias"]))

    shape = EncoderShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_encoder_heads,
        intermediate_size=config.encoder_inner,
        norm_eps=_EPSILON,
        pre_norm=True,
    )
    layers = [layer(f"model.encoder.layers.{index}") for index in range(config.num_encoder_layers)]
    return _Loaded(
        [convolution("model.encoder.conv1"), convolution("model.encoder.conv2")],
        weights["model.encoder.embed_positions.weight"].copy(),
        NativeEncoder(pool, shape, layers, norm("model.encoder.layer_norm")),
        NativeLinear(pool, _stacked([linear(f"model.decoder.{name}") for name in cross_products(config)])),
    )


def _stacked(parts: list[LinearWeights]) -> LinearWeights:
    biases = [np.zeros(len(p.weight), np.float32) if p.bias is None else p.bias for p in parts]
    return LinearWeights(np.concatenate([part.weight for part in parts]), np.concatenate(biases))
