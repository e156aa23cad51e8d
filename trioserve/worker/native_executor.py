"""Computes steps by the native kernels: one call for all layers of a step, one for its logits."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.models.config import DecoderConfig
from trioserve.worker.executor import Highest
from trioserve.worker.kv_layout import KVCacheLayout
from trioserve.worker.layer_groups import LayerGroups, group_layers
from trioserve.worker.native_batch import NativeBatches
from trioserve.worker.native_buffers import Buffer, mapped_zeros, populate
from trioserve.worker.native_program import decoder_shape, make_decoder
from trioserve.worker.native_weights import load_native_weights
from trioserve_kernels.native import Decoder, ThreadPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.worker.batch import ScheduledSequence
    from trioserve.worker.lora import Adapter
    from trioserve_kernels.native import Library, Phase

__all__ = ["NativeExecutor"]


class NativeExecutor:
    """See `trioserve.worker.executor.Executor`. It takes no adapters.

    Owns `config.threads` threads, the caller's included. Imports no torch: that takes a second or two, and
    more than 100 MB. Where something else has brought it (custom logits processors, for example), its own
    threads would be in the way: it is told to use one in the thread that calls.

    Raises:
      ModelNotSupportedError, ModelSourceError: see `load_native_weights`.
    """

    def __init__(self, library: Library, model: ResolvedModel, config: EngineConfig) -> None:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        self.kernels = _describe(library, config.threads)
        self._library = library
        self._source = model
        self._cache_config = config.cache
        self._closing = ExitStack()
        self._pool = self._closing.enter_context(ThreadPool(library, config.threads))
        self._loaded: _Loaded | None = None
        # Invariant: None exactly between free_weights and load_weights, and after close.
        self._cache: np.ndarray | None = None
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._loaded = loaded = self._load()
            on_error.pop_all()
        self.config: DecoderConfig = loaded.config
        self.dtype = model.dtype
        self.bytes_per_block = loaded.decoder.block_bytes
        self.layout = KVCacheLayout(block_size=config.cache.block_size, windows=loaded.groups.windows)
        self._batches = NativeBatches(len(self.layout.windows), config.cache.block_size)
        self._hidden = Buffer(np.float32, self.config.hidden_size)
        self._logits = Buffer(np.float32, self.config.vocab_size)

    def max_num_seqs(self, num_blocks: int) -> None:
        """Their blocks are all they need."""

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._cache = mapped_zeros(num_blocks * self.bytes_per_block)
        self._attach_cache()

    def populate_kv_cache(self, first_block: int, end_block: int) -> None:
        if self._cache is not None:
            populate(self._cache[first_block * self.bytes_per_block : end_block * self.bytes_per_block])

    def free_kv_cache(self) -> None:
        self._cache = None

    def free_weights(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def load_weights(self) -> None:
        if self._loaded is None:
            self._loaded = self._load()
            self._attach_cache()

    def forward(self, sequences: Sequence[ScheduledSequence], adapters: Mapping[str, Adapter]) -> list[int]:
        assert not adapters, "the native kernels take no adapters"
        batch = self._batches.make(sequences)
        self._decoder.forward(batch.step, self._hidden.reserve(batch.num_tokens))
        return batch.first_rows

    def logits(self, rows: Sequence[int]) -> np.ndarray:
        chosen = np.array(rows, np.int32)
        out = self._logits.reserve(len(rows))
        self._decoder.logits(self._hidden.address, chosen.ctypes.data, len(rows), out=out)
        return self._logits.rows(len(rows))

    def highest(self, rows: Sequence[int]) -> Highest:
        chosen, token_ids = np.array(rows, np.int32), np.empty(len(rows), np.int32)
        self._decoder.logits(
            self._hidden.address, chosen.ctypes.data, len(rows), highest_ids=token_ids.ctypes.data
        )
        return Highest(token_ids.tolist(), (token_ids >= 0).tolist())

    def take_times(self) -> Mapping[Phase, float]:
        """Seconds that steps have spent in each phase of the layers since the last call."""
        return self._decoder.take_times()

    def close(self) -> None:
        self.free_weights()
        self.free_kv_cache()
        self._closing.close()

    @property
    def _decoder(self) -> Decoder:
        assert self._loaded is not None, "the weights have been freed"
        return self._loaded.decoder

    def _load(self) -> _Loaded:
        with ExitStack() as closing:
            weights = closing.enter_context(load_native_weights(self._source, self._library, self._pool))
            groups = group_layers([layer.window for layer in weights.config.layers])
            shape = decoder_shape(weights.config, self._source.dtype, self._cache_config, groups)
            decoder = closing.enter_context(make_decoder(self._pool, weights, shape, groups))
            return _Loaded(weights.config, groups, decoder, closing.pop_all())

    def _attach_cache(self) -> None:
        """Weights and cache come and go independently; a step needs both."""
        if self._loaded is not None and self._cache is not None:
            num_blocks = len(self._cache) // self.bytes_per_block
            # By its address: the decoder would keep the array alive.
            self._decoder.set_cache(self._cache.ctypes.data, num_blocks)


def _describe(library: Library, threads: int) -> str:
    return f"{library.tier} kernels in {threads} thread{'s' if threads > 1 else ''}"


@attrs.frozen(eq=False)
class _Loaded:
    config: DecoderConfig
    groups: LayerGroups
    decoder: Decoder
    closing: ExitStack
    """Of the decoder and its weights."""

    def close(self) -> None:
        self.closing.close()
