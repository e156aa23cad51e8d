"""What the worker asks of a decoder model, and what a decoder asks of the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from trioserve.models.config import DecoderConfig

__all__ = ["AdapterContext", "AttentionContext", "DecoderModel"]


class AttentionContext(Protocol):
    """The attention of one step: knows which token belongs to which sequence, and where its pages are."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Store the step's keys and values in the layer's cache; attend causally over each sequence, as far
        back as the layer sees.

        layer: its index; query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]; kv_cache: the
        layer's, in the backend's own layout. Returns [T, heads, head_dim] of query's dtype.
        """
        ...


class AdapterContext(Protocol):
    """The low-rank adapters of one step: knows which rows have which."""

    def add(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to each row of y, in place, what its adapter makes of the same row of x.

        product: a key of `trioserve.models.products`; x: [T, in_features]; y: [T, out_features], the sum of
        all parts.
        """
        ...


class DecoderModel(Protocol):
    """A model that turns tokens into logits.

    A fresh one has uninitialised parameters: fill every tensor of `weights()`, then call `pack()`, and only
    then `forward` and `logits`. None of them is safe to call from two threads at a time.
    """

    config: DecoderConfig
    dtype: torch.dtype

    def __init__(self, raw_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        """raw_config: the contents of config.json.

        Raises:
          ModelNotSupportedError: it is damaged, or asks for what is not implemented.
        """
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Every tensor that a checkpoint must hold, by its name there -> the memory that it fills.

        Several may be parts of one fused matrix.
        """
        ...

    def is_redundant(self, name: str) -> bool:
        """Is this checkpoint tensor a copy of another, or computed here, so that it is skipped?"""
        ...

    def pack(self) -> None:
        """Bring the filled weights into the layout that computes fastest."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        kv_caches: Sequence[torch.Tensor],
        adapters: AdapterContext | None = None,
    ) -> torch.Tensor:
        """The normed hidden state after each token: [T, hidden_size] from int64 [T] and int64 [T].

        adapters: None if no row has one.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, vocab_size] from [R, hidden_size], of the model's dtype."""
        ...
