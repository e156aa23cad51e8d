"""A whole decoder: embedding, layers, norm, output matrix. What differs between families is its config."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import trioserve_kernels.reference as kernels
from trioserve.models.block import Block
from trioserve.models.checkpoint_names import is_redundant
from trioserve.models.layers import Embedding, Linear, RMSNorm
from trioserve.models.rotary import rotary_frequencies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.models.config import DecoderConfig
    from trioserve.models.decoder import AdapterContext, AttentionContext

__all__ = ["CausalLM"]


class CausalLM:
    """All of `trioserve.models.decoder.DecoderModel` but the reading of config.json."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self._embedding = Embedding(
            config.vocab_size, config.hidden_size, scale=config.embedding_scale, dtype=dtype
        )
        self._blocks = [Block(config, layer, dtype) for layer in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset, dtype=dtype)
        if config.tie_word_embeddings:
            self._head = Linear.tied(self._embedding.weight)
        else:
            self._head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, bias=False, dtype=dtype)
        self._frequencies = {
            layer.rotary: torch.from_numpy(rotary_frequencies(layer.rotary, config.head_dim))
            for layer in config.layers
        }

    def weights(self) -> dict[str, torch.Tensor]:
        found = self._embedding.weights("model.embed_tokens.") | self._norm.weights("model.norm.")
        for index, block in enumerate(self._blocks):
            found |= block.weights(f"model.layers.{index}.")
        return found | self._head.weights("")

    def is_redundant(self, name: str) -> bool:
        return is_redundant(self.config, name)

    def pack(self) -> None:
        for block in self._blocks:
            block.pack()
        self._norm.pack()
        self._head.pack()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        kv_caches: Sequence[torch.Tensor],
        adapters: AdapterContext | None = None,
    ) -> torch.Tensor:
        rotations = {
            rotary: kernels.rotary_tables(positions, frequencies)
            for rotary, frequencies in self._frequencies.items()
        }
        x = self._embedding(token_ids)
        for layer, block, kv_cache in zip(self.config.layers, self._blocks, kv_caches, strict=True):
            x = block(x, rotations[layer.rotary], attention, kv_cache, adapters)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap
