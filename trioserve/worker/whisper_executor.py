"""Computes steps of Whisper: audio that is new is encoded, and then all sequences decode together."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from trioserve.audio_input import MAX_BEAM_WIDTH
from trioserve.models.config_whisper import WhisperConfig, whisper_config
from trioserve.models.whisper import TorchHearing, WhisperDecoder
from trioserve.models.whisper_weights import is_redundant, whisper_shapes
from trioserve.worker.alignment import align, alignment_heads
from trioserve.worker.attention import TorchAttention
from trioserve.worker.beam_pages import BeamPages
from trioserve.worker.checkpoint import read_config
from trioserve.worker.heard_audio import HeardAudio, StepHearing
from trioserve.worker.loader import fill
from trioserve.worker.log_mel import LogMel
from trioserve.worker.native_hearing import NativeHearing
from trioserve.worker.torch_executor import first_rows_of, highest_of, inputs_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trioserve.audio_input import AudioInput
    from trioserve.config import DType, EngineConfig, ResolvedModel
    from trioserve.worker.batch import ScheduledSequence
    from trioserve.worker.beam_pages import PageCopy
    from trioserve.worker.executor import Highest
    from trioserve.worker.kv_layout import KVCacheLayout
    from trioserve.worker.lora import Adapter
    from trioserve_kernels.native import Library

__all__ = ["WhisperExecutor"]


class Hearing(Protocol):
    """From features to what the decoder remembers of them."""

    def hear(self, features: np.ndarray) -> torch.Tensor:
        """Keys and values of a window, of all layers of the decoder: [num_frames, layers * 2 * hidden_size].

        features: fp32 [2 * num_frames, mels].
        """
        ...


class WhisperExecutor:
    """See `trioserve.worker.executor.Executor`. Every sequence has its `audio`.

    A block of the cache stands for `block_size` tokens of text, the same part of a seat for audio, and a page
    for each beam that a search can have: what holds a whole text brings a seat and beams with it.

    Args:
      library: native kernels for the encoder; or why torch computes that, too.

    Raises:
      ModelNotSupportedError: the checkpoint asks for what is not implemented.
      ModelSourceError: it is damaged.
    """

    config = None
    """It takes no adapters."""
    dtype: DType = "float32"

    @torch.inference_mode()
    def __init__(self, model: ResolvedModel, config: EngineConfig, library: Library | str) -> None:
        self.kernels = _describe(library, config)
        self._source = model
        self._num_threads = config.threads
        self._whisper = whisper_config(read_config(Path(model.directory)))
        self._attention = TorchAttention(self._whisper, config.cache.block_size, torch.float32)
        self._log_mel = LogMel(self._whisper.num_mel_bins)
        self._blocks_per_seat = -(-model.max_model_len // config.cache.block_size)
        self._alignment_heads = alignment_heads(Path(model.directory), self._whisper)
        self._hidden = torch.empty(0)
        # Invariant: both are there from allocate_kv_cache to free_kv_cache.
        self._kv_caches: list[torch.Tensor] = []
        self._heard: HeardAudio | None = None
        self._block_size = config.cache.block_size
        self._beam_pages: BeamPages | None = None
        # Invariant: None exactly between free_weights and load_weights.
        self._model: tuple[Hearing, WhisperDecoder] | None = None
        self._native = None if isinstance(library, str) else NativeHearing(library, config.threads)
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self.load_weights()
            on_error.pop_all()

    @property
    def layout(self) -> KVCacheLayout:
        return self._attention.layout

    @property
    def bytes_per_block(self) -> int:
        seat = HeardAudio.bytes_per_seat(self._whisper)
        return (1 + MAX_BEAM_WIDTH) * self._attention.bytes_per_block + -(-seat // self._blocks_per_seat)

    def max_num_seqs(self, num_blocks: int) -> int:
        return max(1, num_blocks // self._blocks_per_seat)

    @torch.inference_mode()
    def allocate_kv_cache(self, num_blocks: int) -> None:
        num_seats = self.max_num_seqs(num_blocks)
        num_pages = num_seats * MAX_BEAM_WIDTH * self._blocks_per_seat
        self._kv_caches = self._attention.allocate(num_blocks + num_pages)
        self._beam_pages = BeamPages(num_blocks, num_pages, self._block_size)
        self._heard = HeardAudio(self._whisper, num_seats)

    def populate_kv_cache(self, first_block: int, end_block: int) -> None:
        """Left to the first use."""

    def free_kv_cache(self) -> None:
        self._kv_caches, self._heard, self._beam_pages = [], None, None

    def free_weights(self) -> None:
        self._model = None
        if self._native is not None:
            self._native.free()

    @torch.inference_mode()
    def load_weights(self) -> None:
        if self._model is None:
            torch.set_num_threads(1)  # see TorchExecutor
            weights = _load(self._source, self._whisper)
            decoder = WhisperDecoder(self._whisper, weights)
            if self._native is None:
                self._model = TorchHearing(self._whisper, weights), decoder
            else:
                self._native.load(self._whisper, {name: w.numpy() for name, w in weights.items()})
                self._model = self._native, decoder
            torch.set_num_threads(self._num_threads)

    @torch.inference_mode()
    def forward(self, sequences: Sequence[ScheduledSequence], adapters: Mapping[str, Adapter]) -> list[int]:
        assert self._model is not None, "the weights have been freed"
        assert self._heard is not None, "the cache has been freed"
        order = self._attention.arrange(sequences)
        arranged = [sequences[index] for index in order]
        seats = self._seats_of([_audio_of(sequence) for sequence in arranged], self._heard)
        self._hidden = self._model[1].forward(
            *inputs_of(arranged),
            self._attention.plan(arranged),
            StepHearing.of(arranged, seats, self._heard),
            self._kv_caches,
        )
        return first_rows_of(order, arranged)

    @property
    def beam_pages(self) -> BeamPages:
        """Of the cache that is there; not those of the one before it."""
        assert self._beam_pages is not None, "the cache has been freed"
        return self._beam_pages

    @torch.inference_mode()
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        if copies:
            sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
            for cache in self._kv_caches:
                cache[:, targets] = cache[:, sources]

    @torch.inference_mode()
    def align(self, audio: AudioInput, token_ids: Sequence[int], num_prompt_tokens: int) -> list[float]:
        """When each token from `num_prompt_tokens` on was said (`trioserve.worker.alignment`). Between steps.

        Raises:
          ValueError: weights or cache have been freed.
        """
        heard = self._heard
        if self._model is None or heard is None:
            raise ValueError("the engine is asleep")
        (seat,) = self._seats_of([audio], heard)
        return align(
            self._model[1],
            self._alignment_heads,
            partial(heard.at, seat),
            token_ids,
            num_prompt_tokens=num_prompt_tokens,
            num_samples=len(audio.samples) // 4,
        )

    def logits(self, rows: Sequence[int]) -> np.ndarray:
        logits: np.ndarray = self._compute_logits(rows).numpy()
        return logits

    @torch.inference_mode()
    def highest(self, rows: Sequence[int]) -> Highest:
        return highest_of(self._compute_logits(rows))

    def close(self) -> None:
        if self._native is not None:
            self._native.close()

    @torch.inference_mode()
    def _compute_logits(self, rows: Sequence[int]) -> torch.Tensor:
        assert self._model is not None
        return self._model[1].logits(self._hidden[list(rows)])

    def _seats_of(self, audios: Sequence[AudioInput], heard: HeardAudio) -> list[int]:
        """The seat of each, which is encoded if it has none yet."""
        wanted = {audio.digest for audio in audios}
        found = []
        for audio in audios:
            seat = heard.seats.find(audio.digest)
            if seat is None:
                seat = heard.seats.take(audio.digest, wanted)
                self._encode(audio, seat, heard)
            found.append(seat)
        return found

    def _encode(self, audio: AudioInput, seat: int, heard: HeardAudio) -> None:
        assert self._model is not None
        features = self._log_mel.of(np.frombuffer(audio.samples, np.float32))
        heard.store(seat, self._model[0].hear(features))


def _audio_of(sequence: ScheduledSequence) -> AudioInput:
    assert sequence.audio is not None, "the frontend lets no other prompt through"
    return sequence.audio


def _describe(library: Library | str, config: EngineConfig) -> str:
    if isinstance(library, str):
        return f"torch ({library})"
    return f"{library.tier} kernels in {config.threads} threads for audio, torch for text"


def _load(model: ResolvedModel, config: WhisperConfig) -> dict[str, torch.Tensor]:
    weights = {name: torch.empty(shape) for name, shape in whisper_shapes(config).items()}
    fill(weights, Path(model.directory), is_redundant=is_redundant)
    return weights
