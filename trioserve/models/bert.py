"""A BERT in torch: the definition that the native encoder is held to, and what computes without kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.models.bert_config import BertActivation, BertConfig
    from trioserve.models.bert_weights import Affine, BertLayerWeights, BertWeights

__all__ = ["Bert"]


class Bert:
    """Rows of all texts lie end to end: there are no rows of padding."""

    def __init__(self, config: BertConfig, weights: BertWeights, dtype: torch.dtype) -> None:
        """The weights are used where they are, if `dtype` is float32."""
        self.dtype = dtype
        self._config = config
        self._words = torch.from_numpy(weights.words).to(dtype)
        self._positions = torch.from_numpy(weights.positions).to(dtype)
        self._types = None if weights.types is None else torch.from_numpy(weights.types).to(dtype)
        self._norm = _Norm(weights.norm, config.norm_eps, dtype)
        self._layers = [_Layer(config, layer, dtype) for layer in weights.layers]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        type_ids: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """The hidden state of each token, [T, hidden_size].

        token_ids, positions (of each token in its text, from 0), type_ids: int64 [T]. lengths: of the texts,
        T together.
        """
        x = self._words[token_ids] + self._positions[positions + self._config.first_position]
        if self._types is not None:
            x = x + self._types[type_ids]
        x = self._norm(x)
        for layer in self._layers:
            x = layer(x, lengths)
        return x


class _Linear:
    def __init__(self, parts: Sequence[Affine], dtype: torch.dtype) -> None:
        """parts: side by side in what it gives."""
        self._weight = torch.cat([torch.from_numpy(part.weight) for part in parts]).to(dtype)
        self._bias = torch.cat([torch.from_numpy(part.bias) for part in parts]).to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


class _Norm:
    def __init__(self, weights: Affine, eps: float, dtype: torch.dtype) -> None:
        self._weight = torch.from_numpy(weights.weight).to(dtype)
        self._bias = torch.from_numpy(weights.bias).to(dtype)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class _Layer:
    def __init__(self, config: BertConfig, weights: BertLayerWeights, dtype: torch.dtype) -> None:
        self._config = config
        self._qkv = _Linear([weights.query, weights.key, weights.value], dtype)
        self._output = _Linear([weights.output], dtype)
        self._attention_norm = _Norm(weights.attention_norm, config.norm_eps, dtype)
        self._up = _Linear([weights.up], dtype)
        self._down = _Linear([weights.down], dtype)
        self._output_norm = _Norm(weights.output_norm, config.norm_eps, dtype)

    def __call__(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        x = self._attention_norm(x + self._output(self._attend(self._qkv(x), lengths)))
        return self._output_norm(x + self._down(_activate(self._up(x), self._config.activation)))

    def _attend(self, qkv: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """[T, hidden_size] from [T, 3 hidden_size]; each text sees itself, and all of itself."""
        out = qkv.new_empty(len(qkv), self._config.hidden_size)
        for text, result in zip(_texts(qkv, lengths), _texts(out, lengths), strict=True):
            heads = text.view(len(text), 3, self._config.num_heads, self._config.head_dim)
            query, key, value = heads.permute(1, 2, 0, 3).unsqueeze(1)  # [3, 1, heads, L, head_dim]
            attended = scaled_dot_product_attention(query, key, value)
            result.copy_(attended[0].transpose(0, 1).reshape(len(text), -1))
        return out


def _texts(rows: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    return torch.split(rows, list(lengths))


def _activate(x: torch.Tensor, activation: BertActivation) -> torch.Tensor:
    if activation == "relu":
        return relu(x)
    return gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
