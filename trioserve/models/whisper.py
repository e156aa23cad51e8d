"""Whisper in torch: the encoder that hears, and the decoder that writes. float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import conv1d, embedding, gelu, layer_norm, linear, scaled_dot_product_attention

from trioserve.models.whisper_weights import cross_products

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from trioserve.models.config_whisper import WhisperConfig
    from trioserve.models.decoder import AttentionContext

__all__ = ["CrossAttention", "TorchHearing", "WhisperDecoder"]

_EPSILON = 1e-5


class CrossAttention(Protocol):
    """The attention of one step to what is heard: knows which audio each token's sequence has."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query: [T, heads, head_dim], scaled. Returns [T, heads, head_dim]."""
        ...


class _Module:
    """Tensors of a checkpoint below one name."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def tensors(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        full = f"{self._prefix}.{name}"
        return self._weights[f"{full}.weight"], self._weights.get(f"{full}.bias")


class _Linear:
    """x W^T + b; of several names, the matrices are stacked into one."""

    def __init__(self, module: _Module, *names: str) -> None:
        parts = [module.tensors(name) for name in names]
        self._weight = torch.cat([weight for weight, _ in parts]) if len(parts) > 1 else parts[0][0]
        biases = [torch.zeros(len(weight)) if bias is None else bias for weight, bias in parts]
        self._bias = torch.cat(biases)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


class _Norm:
    def __init__(self, module: _Module, name: str) -> None:
        self._weight, self._bias = module.tensors(name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], self._weight, self._bias, _EPSILON)


class _MLP:
    def __init__(self, module: _Module) -> None:
        self._norm = _Norm(module, "final_layer_norm")
        self._up = _Linear(module, "fc1")
        self._down = _Linear(module, "fc2")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(gelu(self._up(self._norm(x))))


class _EncoderLayer:
    def __init__(self, module: _Module, num_heads: int) -> None:
        self._norm = _Norm(module, "self_attn_layer_norm")
        self._qkv = _Linear(module, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = _Linear(module, "self_attn.out_proj")
        self._mlp = _MLP(module)
        self._num_heads = num_heads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self._qkv(self._norm(x)).view(len(x), 3, self._num_heads, -1).permute(1, 2, 0, 3)
        heard = scaled_dot_product_attention(*qkv[:, None])[0]
        x = x + self._output(heard.transpose(0, 1).flatten(1))
        return x + self._mlp(x)


class TorchHearing:
    """The encoder, and what the decoder's cross-attention keeps of what it gives.

    weights: of the whole checkpoint, by their names there.
    """

    def __init__(self, config: WhisperConfig, weights: Mapping[str, torch.Tensor]) -> None:
        module = _Module(weights, "model.encoder")
        self._convolutions = [module.tensors("conv1"), module.tensors("conv2")]
        self._positions, _ = module.tensors("embed_positions")
        self._layers = [
            _EncoderLayer(_Module(weights, f"model.encoder.layers.{index}"), config.num_encoder_heads)
            for index in range(config.num_encoder_layers)
        ]
        self._norm = _Norm(module, "layer_norm")
        self._keys_values = _Linear(_Module(weights, "model.decoder"), *cross_products(config))

    def hear(self, features: np.ndarray) -> torch.Tensor:
        """See `trioserve.worker.whisper_executor.Hearing`."""
        x = torch.from_numpy(features).T
        for stride, (weight, bias) in enumerate(self._convolutions, 1):
            x = gelu(conv1d(x, weight, bias, stride=stride, padding=1))
        x = x.T + self._positions
        for layer in self._layers:
            x = layer(x)
        return self._keys_values(self._norm(x))


class _DecoderLayer:
    def __init__(self, module: _Module, config: WhisperConfig, index: int) -> None:
        self._index = index
        self._heads = (config.num_heads, config.head_dim)
        self._scale = config.attention_scale
        self._norm = _Norm(module, "self_attn_layer_norm")
        self._qkv = _Linear(module, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = _Linear(module, "self_attn.out_proj")
        self._cross_norm = _Norm(module, "encoder_attn_layer_norm")
        self._cross_query = _Linear(module, "encoder_attn.q_proj")
        self._cross_output = _Linear(module, "encoder_attn.out_proj")
        self._mlp = _MLP(module)

    def __call__(
        self, x: torch.Tensor, read: AttentionContext, heard: CrossAttention, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = self._qkv(self._norm(x)).view(len(x), 3, *self._heads).unbind(1)
        x = x + self._output(read.attend(self._index, query, key, value, kv_cache).flatten(1))
        query = self._cross_query(self._cross_norm(x)).mul_(self._scale).view(len(x), *self._heads)
        x = x + self._cross_output(heard.attend(self._index, query).flatten(1))
        return x + self._mlp(x)


class WhisperDecoder:
    """weights: of the whole checkpoint, by their names there."""

    def __init__(self, config: WhisperConfig, weights: Mapping[str, torch.Tensor]) -> None:
        module = _Module(weights, "model.decoder")
        self._tokens, _ = module.tensors("embed_tokens")
        self._positions, _ = module.tensors("embed_positions")
        layers = [
            _Module(weights, f"model.decoder.layers.{index}") for index in range(config.num_decoder_layers)
        ]
        self._layers = [_DecoderLayer(layer, config, index) for index, layer in enumerate(layers)]
        self._norm = _Norm(module, "layer_norm")

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        read: AttentionContext,
        heard: CrossAttention,
        kv_caches: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """The normed hidden state after each token: [T, hidden_size] from int64 [T] and int64 [T]."""
        x = embedding(token_ids, self._tokens) + embedding(positions, self._positions)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x = layer(x, read, heard, kv_cache)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, vocab_size] from [R, hidden_size]."""
        return linear(hidden, self._tokens)
