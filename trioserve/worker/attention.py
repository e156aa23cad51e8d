"""Attention over the paged KV cache: what a backend is, and the one in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import trioserve_kernels.reference as kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.models.config import DecoderConfig
    from trioserve.models.decoder import AttentionContext
    from trioserve.worker.batch import ScheduledSequence

__all__ = ["AttentionBackend", "TorchAttention"]


class AttentionBackend(Protocol):
    """Owns the KV cache's layout, the order of a step's rows, and the attention itself."""

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of `block_size` tokens in all layers."""
        ...

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """One cache per layer, all zeros; memory is taken as blocks are first written."""
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

    def __init__(self, config: DecoderConfig, block_size: int, dtype: torch.dtype) -> None:
        self._config = config
        self._block_size = block_size
        self._dtype = dtype

    @property
    def bytes_per_block(self) -> int:
        return self._config.num_layers * math.prod(self._cache_shape(1)) * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        return [self._lazy_zeros(self._cache_shape(num_blocks)) for _ in range(self._config.num_layers)]

    def arrange(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        """Decode rows first, shortest first (so that neighbours are padded little), then longer chunks."""

        def place(index: int) -> tuple[bool, int]:
            sequence = sequences[index]
            is_chunk = len(sequence.token_ids) > 1
            return is_chunk, 0 if is_chunk else sequence.start

        return sorted(range(len(sequences)), key=place)

    def plan(self, sequences: Sequence[ScheduledSequence]) -> TorchAttentionContext:
        num_decodes = sum(len(sequence.token_ids) == 1 for sequence in sequences)
        row = 0
        decodes = []
        for group in _decode_groups(sequences[:num_decodes], self._block_size):
            decodes.append(_plan_decodes(group, row, self._block_size, self._dtype))
            row += len(group)
        chunks = []
        for sequence in sequences[num_decodes:]:
            chunks.append(_plan_chunk(sequence, row, self._block_size, self._dtype))
            row += len(sequence.token_ids)
        slots = np.concatenate([_slots(sequence, self._block_size) for sequence in sequences])
        return TorchAttentionContext(
            scale=self._config.attention_scale,
            slots=torch.from_numpy(slots),
            decodes=decodes,
            chunks=chunks,
        )

    def _cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self._block_size, self._config.num_kv_heads, self._config.head_dim)

    def _lazy_zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        # torch.zeros writes the zeros; numpy asks the system for pages that are zero once they are touched.
        memory = np.zeros(math.prod(shape) * self._dtype.itemsize, np.uint8)
        return torch.from_numpy(memory).view(self._dtype).view(shape)


@attrs.frozen(eq=False)
class _DecodeGroup:
    """Sequences with one new token each, of similar length, attended in one call."""

    rows: slice
    blocks: torch.Tensor
    """int64 [B * width]: each sequence's pages, padded with block 0 (any block does: the mask hides it)."""
    mask: torch.Tensor
    """[B, 1, 1, width * block_size], of the model's dtype: 0, or -inf beyond the sequence's end."""


@attrs.frozen(eq=False)
class _Chunk:
    """Several new tokens of one sequence."""

    rows: slice
    blocks: torch.Tensor | None
    """int64 [pages]; None if nothing was cached before, so that the new keys are all there are."""
    mask: torch.Tensor | None
    """[new tokens, pages * block_size], of the model's dtype; None: plain causal."""


_MAX_GROUP_TOKENS = 16384
"""Of all sequences of a decode group, padding included: bounds the gathered copy (12 MB for SmolLM2)."""


def _slots(sequence: ScheduledSequence, block_size: int) -> np.ndarray:
    """The place in the cache of each new token, int64."""
    end = sequence.start + len(sequence.token_ids)
    if end == sequence.start + 1:
        block, offset = divmod(sequence.start, block_size)
        return np.array([sequence.block_table[block] * block_size + offset])
    first_block = sequence.start // block_size
    blocks = np.asarray(sequence.block_table[first_block : -(-end // block_size)], np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size)
    skip = sequence.start - first_block * block_size
    return slots.reshape(-1)[skip : skip + len(sequence.token_ids)]


def _num_pages(sequence: ScheduledSequence, block_size: int) -> int:
    return -(-(sequence.start + len(sequence.token_ids)) // block_size)


def _decode_groups(
    sequences: Sequence[ScheduledSequence], block_size: int
) -> Iterator[list[ScheduledSequence]]:
    """Cut decode rows, shortest first, so that padding at most doubles a sequence (of over 8 pages)."""
    group: list[ScheduledSequence] = []
    for sequence in sequences:
        width = _num_pages(sequence, block_size)
        if group:
            too_wide = width > max(8, 2 * _num_pages(group[0], block_size))
            if too_wide or (len(group) + 1) * width * block_size > _MAX_GROUP_TOKENS:
                yield group
                group = []
        group.append(sequence)
    if group:
        yield group


def _plan_decodes(
    sequences: Sequence[ScheduledSequence], first_row: int, block_size: int, dtype: torch.dtype
) -> _DecodeGroup:
    width = _num_pages(sequences[-1], block_size)
    blocks = np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        pages = _num_pages(sequence, block_size)
        blocks[row, :pages] = sequence.block_table[:pages]
    last_seen = torch.tensor([sequence.start for sequence in sequences])
    return _DecodeGroup(
        slice(first_row, first_row + len(sequences)),
        torch.from_numpy(blocks.reshape(-1)),
        _mask(last_seen, width * block_size, dtype)[:, None, None],
    )


def _mask(last_seen: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, length]: 0 up to and with each row's last position, -inf after it."""
    hidden = torch.arange(length) > last_seen[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _plan_chunk(sequence: ScheduledSequence, first_row: int, block_size: int, dtype: torch.dtype) -> _Chunk:
    num_new = len(sequence.token_ids)
    rows = slice(first_row, first_row + num_new)
    if sequence.start == 0:
        return _Chunk(rows, None, None)
    pages = _num_pages(sequence, block_size)
    last_seen = torch.arange(sequence.start, sequence.start + num_new)
    return _Chunk(
        rows, torch.tensor(sequence.block_table[:pages]), _mask(last_seen, pages * block_size, dtype)
    )


@attrs.frozen(eq=False, kw_only=True)
class TorchAttentionContext:
    """See `trioserve.models.decoder.AttentionContext`; built once per step, used by every layer."""

    scale: float
    slots: torch.Tensor
    """int64 [T]."""
    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]
    # Invariant: the rows of `decodes`, then those of `chunks`, cover [0, T) in order.

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        kernels.reshape_and_cache(key, value, kv_cache[0], kv_cache[1], self.slots)
        outputs = [self._decode(group, query[group.rows], kv_cache) for group in self.decodes]
        for chunk in self.chunks:
            if chunk.blocks is None:
                keys, values = key[None, chunk.rows], value[None, chunk.rows]
            else:
                keys, values = _gather(kv_cache, chunk.blocks, 1)
            outputs.append(self._attend_chunk(chunk, query[chunk.rows], keys, values))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(self, group: _DecodeGroup, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """The query heads that share a key-value head take the place of query rows.

        They see the same keys, so nothing is repeated, and the products have several rows: in bf16, with 8
        sequences of 1,024 tokens, 0.5 ms against 3.0 ms for one row per head.
        """
        keys, values = _gather(kv_cache, group.blocks, len(query))
        num_kv_heads = keys.shape[2]
        output = scaled_dot_product_attention(
            query.reshape(len(query), num_kv_heads, -1, query.shape[-1]),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=group.mask,
            scale=self.scale,
        )
        return output.reshape(query.shape)

    def _attend_chunk(
        self, chunk: _Chunk, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        output = scaled_dot_product_attention(
            query[None].transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)


def _gather(
    kv_cache: torch.Tensor, blocks: torch.Tensor, num_sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the pages, each [num_sequences, tokens, kv_heads, head_dim]."""
    keys, values = (
        part.index_select(0, blocks).view(num_sequences, -1, *kv_cache.shape[3:]) for part in kv_cache
    )
    return keys, values
