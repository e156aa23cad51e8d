"""Attention over the paged KV cache: what a backend is, and the one in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

import trioserve_kernels.reference as kernels
from trioserve.worker.attention_parts import Part
from trioserve.worker.attention_plan import Planner, new_slots, sort_key
from trioserve.worker.kv_layout import KVCacheLayout
from trioserve.worker.layer_groups import group_layers
from trioserve.worker.native_buffers import mapped_zeros

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.models.config import LayerConfig
    from trioserve.models.config_whisper import SeenLayer
    from trioserve.models.decoder import AttentionContext
    from trioserve.worker.batch import ScheduledSequence

__all__ = ["AttentionBackend", "TorchAttention"]


class AttentionShape(Protocol):
    """What it has to know of a decoder: a `DecoderConfig` is one."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def attention_scale(self) -> float: ...
    @property
    def layers(self) -> Sequence[SeenLayer | LayerConfig]: ...


class AttentionBackend(Protocol):
    """Owns the KV cache's layout, the order of a step's rows, and the attention itself."""

    @property
    def layout(self) -> KVCacheLayout:
        """How the layers share out the cache."""
        ...

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of `block_size` tokens in all layers of a group."""
        ...

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """A cache for each layer, all zeros; memory is taken as blocks are first written.

        The layers that have the same place in their groups are given the same memory: a block belongs to one
        group at a time.
        """
        ...

    def arrange(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        """The order in which the sequences' tokens are to be laid end to end, as indices."""
        ...

    def plan(self, sequences: Sequence[ScheduledSequence]) -> AttentionContext:
        """The metadata of one step, for sequences in the order of `arrange`."""
        ...


class TorchAttention:
    """Pages are gathered into contiguous keys and values, then torch's fused CPU attention runs.

    A layer's cache is [2 (keys, values), num_blocks, block_size, kv_heads, head_dim] in the model's dtype.
    """

    def __init__(self, config: AttentionShape, block_size: int, dtype: torch.dtype) -> None:
        self._config = config
        self._block_size = block_size
        self._dtype = dtype
        self._groups = group_layers([layer.window for layer in config.layers])
        self._planners = {
            window: Planner(
                window=window,
                block_size=block_size,
                queries_per_key=config.num_heads // config.num_kv_heads,
                dtype=dtype,
            )
            for window in self._groups.windows
        }

    @property
    def layout(self) -> KVCacheLayout:
        return KVCacheLayout(block_size=self._block_size, windows=self._groups.windows)

    @property
    def bytes_per_block(self) -> int:
        return self._groups.size * math.prod(self._cache_shape(1)) * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        caches = [self._lazy_zeros(self._cache_shape(num_blocks)) for _ in range(self._groups.size)]
        return [caches[place] for _, place in self._groups.places]

    def arrange(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        return sorted(range(len(sequences)), key=lambda index: sort_key(sequences[index]))

    def plan(self, sequences: Sequence[ScheduledSequence]) -> TorchAttentionContext:
        plans = {window: planner.plan(sequences) for window, planner in self._planners.items()}
        groups = []
        for group, window in enumerate(self._groups.windows):
            tables = [sequence.block_tables[group] for sequence in sequences]
            parts = [(part, part.look_up(tables)) for part in plans[window]]
            groups.append(_GroupPlan(new_slots(sequences, tables, self._block_size), parts))
        return TorchAttentionContext(
            scale=self._config.attention_scale, layers=[groups[group] for group, _ in self._groups.places]
        )

    def _cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self._block_size, self._config.num_kv_heads, self._config.head_dim)

    def _lazy_zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        # Others than the system may write the zeros: torch.zeros does, and calloc where it reuses memory.
        memory = mapped_zeros(math.prod(shape) * self._dtype.itemsize)
        return torch.from_numpy(memory).view(self._dtype).view(shape)


@attrs.frozen(eq=False)
class _GroupPlan:
    """One step for the layers of a group."""

    slots: torch.Tensor
    """int64 [T]: where the new keys and values go."""
    parts: list[tuple[Part, torch.Tensor | None]]
    """With the blocks that hold each part's pages (see `look_up`)."""
    # Invariant: the parts' rows cover [0, T) in order.


@attrs.frozen(eq=False, kw_only=True)
class TorchAttentionContext:
    """See `trioserve.models.decoder.AttentionContext`; built once per step, used by every layer."""

    scale: float
    layers: list[_GroupPlan]
    """Of each layer, its group's."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        group = self.layers[layer]
        kernels.reshape_and_cache(key, value, kv_cache[0], kv_cache[1], group.slots)
        outputs = []
        for part, blocks in group.parts:
            if blocks is None:
                keys, values = key[None, part.rows], value[None, part.rows]
            else:
                keys, values = _gather(kv_cache, blocks, part.num_sequences)
            outputs.append(part.attend(query[part.rows], keys, values, self.scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gather(
    kv_cache: torch.Tensor, blocks: torch.Tensor, num_sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the pages, each [num_sequences, tokens, kv_heads, head_dim]."""
    keys, values = (
        part.index_select(0, blocks).view(num_sequences, -1, *kv_cache.shape[3:]) for part in kv_cache
    )
    return keys, values
