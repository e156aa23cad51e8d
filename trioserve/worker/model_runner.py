"""Loads a model and runs its steps, in one thread."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch

from trioserve.errors import InvalidRequestError
from trioserve.worker.attention import TorchAttention
from trioserve.worker.batch import SequenceOutput
from trioserve.worker.loader import load_model
from trioserve.worker.logits_processors import ProcessorContext, load_processors
from trioserve.worker.lora import make_adapter, step_adapters
from trioserve.worker.lora_files import read_adapter
from trioserve.worker.masks import GrammarMasks
from trioserve.worker.prompt_logprobs import prompt_logprobs
from trioserve.worker.sampler import Sampler

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.models.decoder import DecoderModel
    from trioserve.sampling_params import SamplingParams
    from trioserve.worker.attention import AttentionBackend
    from trioserve.worker.batch import LogprobRow, ScheduledSequence, StepBatch
    from trioserve.worker.kv_layout import KVCacheLayout
    from trioserve.worker.lora import Adapter
    from trioserve.worker.lora_files import AdapterFile

__all__ = ["ModelRunner"]


class ModelRunner:
    """Owns the weights, adapters, the KV cache, the sampler, and a thread for grammar masks once there is a
    grammar.

    Everything but `check_params` and `read_adapter`, the constructor too, is to be called in one and the same
    thread: torch keeps its number of compute threads per calling thread. All calls block.

    Args:
      model: what to load.
      config: of it, `threads`, the block size, `logits_processors` and the limits that those are told.

    Raises:
      ModelNotSupportedError, ModelSourceError: see `trioserve.worker.loader.load_model`.
      InvalidConfigError: see `trioserve.worker.logits_processors.load_processors`.
    """

    def __init__(self, model: ResolvedModel, config: EngineConfig) -> None:
        self._source = model
        self._num_threads = config.threads
        self._processors = load_processors(config.logits_processors, _processor_context(model, config))
        self._model: DecoderModel | None = None
        # Invariant: None exactly between free_weights and load_weights.
        self._model = loaded = self._load()
        self._attention: AttentionBackend = TorchAttention(
            loaded.config, config.cache.block_size, loaded.dtype
        )
        self._kv_caches: list[torch.Tensor] = []
        # Invariant: one per layer after allocate_kv_cache, empty before it and after free_kv_cache.
        self._masks = GrammarMasks(loaded.config.vocab_size)
        self._sampler = Sampler(loaded.config.vocab_size, self._processors)
        self._decoder, self._dtype = loaded.config, loaded.dtype
        self._max_lora_rank = 0 if config.lora is None else config.lora.max_rank
        self._adapters: dict[str, Adapter] = {}  # how many there are is for those to limit who add them

    @property
    def layout(self) -> KVCacheLayout:
        return self._attention.layout

    @property
    def bytes_per_block(self) -> int:
        return self._attention.bytes_per_block

    def check_params(self, params: SamplingParams) -> None:
        """Ask the custom logits processors. May be called in any thread, also while a step runs.

        Raises:
          InvalidRequestError: one of them refuses such a request, or fails to make up its mind about it.
        """
        for processor in self._processors:
            try:
                processor.validate_params(params)
            except InvalidRequestError:
                raise
            except Exception as error:  # whatever foreign code raises for what some client has sent
                raise InvalidRequestError(
                    f"{type(processor).__name__} cannot process this request: {error!r}"
                ) from error

    def read_adapter(self, path: str) -> AdapterFile:
        """What `add_adapter` takes. May be called in any thread, also while a step runs: it computes nothing.

        Raises:
          LoRANotFoundError, ModelSourceError, ModelNotSupportedError: see
            `trioserve.worker.lora_files.read_adapter`.
        """
        return read_adapter(Path(path), self._decoder, max_rank=self._max_lora_rank)

    def add_adapter(self, key: str, file: AdapterFile) -> None:
        """From now on, sequences may have this adapter; also while the weights are freed.

        Raises:
          ModelNotSupportedError: its values cannot be used.
        """
        with torch.inference_mode():
            self._adapters[key] = make_adapter(file, self._decoder, self._dtype)

    def remove_adapter(self, key: str) -> None:
        """No sequence has it any more, or none ever had."""
        self._adapters.pop(key, None)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve the cache, all zeros; memory is used as blocks are first written."""
        with torch.inference_mode():
            self._kv_caches = self._attention.allocate(num_blocks)

    def free_kv_cache(self) -> None:
        """Give its memory back to the system; no step can run until it is allocated anew."""
        self._kv_caches = []
        _return_memory()

    def free_weights(self) -> None:
        """Give their memory back to the system; no step can run until they are loaded again."""
        self._model = None
        _return_memory()

    def load_weights(self) -> None:
        """Read the same model again, after `free_weights`.

        Raises:
          ModelNotSupportedError, ModelSourceError: it is not what it was.
        """
        if self._model is None:
            self._model = self._load()

    def close(self) -> None:
        """End the thread, if there is one; nothing may be called afterwards, except this."""
        self._masks.close()

    def execute(self, batch: StepBatch) -> list[SequenceOutput]:
        """Compute one step: an output for each sequence, in the batch's order.

        The grammars of its sequences are advanced by the tokens that are drawn.
        """
        assert self._model is not None, "the weights have been freed"
        sampling = [sequence for sequence in batch.sequences if sequence.samples]
        with torch.inference_mode():
            masks = self._masks.begin(sampling)
            hidden, first_rows = self._run_model(self._model, batch)
            told = prompt_logprobs(batch.sequences, first_rows, hidden, self._model.logits)
            drawn: list[SequenceOutput] = []
            if sampling:
                logits = self._model.logits(hidden[_sampled_rows(batch, first_rows)])
                drawn = self._sampler.sample(logits, sampling, masks())
        return _merge(batch, drawn, told)

    def _run_model(self, model: DecoderModel, batch: StepBatch) -> tuple[torch.Tensor, list[int]]:
        """The hidden state after each token; and the row of each sequence's first token among them."""
        order = self._attention.arrange(batch.sequences)
        arranged = [batch.sequences[index] for index in order]
        hidden = model.forward(
            *_inputs(arranged),
            self._attention.plan(arranged),
            self._kv_caches,
            step_adapters(arranged, self._adapters) if self._adapters else None,
        )
        first_rows = [0] * len(order)
        row = 0
        for index, sequence in zip(order, arranged, strict=True):
            first_rows[index] = row
            row += len(sequence.token_ids)
        return hidden, first_rows

    def _load(self) -> DecoderModel:
        # Loading copies memory, for which one thread is enough; hundreds of small parallel copies that wait
        # for each other's threads take twenty times longer on a busy machine.
        torch.set_num_threads(1)
        with torch.inference_mode():
            model = load_model(self._source)
        torch.set_num_threads(self._num_threads)
        return model


def _processor_context(model: ResolvedModel, config: EngineConfig) -> ProcessorContext:
    return ProcessorContext(
        vocab_size=model.vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
    )


def _inputs(sequences: list[ScheduledSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of all sequences laid end to end, int64 [T] each."""
    token_ids: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        token_ids += sequence.token_ids
        positions += range(sequence.start, sequence.start + len(sequence.token_ids))
    return torch.tensor(token_ids), torch.tensor(positions)


def _sampled_rows(batch: StepBatch, first_rows: list[int]) -> torch.Tensor:
    """The rows of each sampling sequence's last known token and of its drafts, in the batch's order."""
    rows: list[int] = []
    for first, sequence in zip(first_rows, batch.sequences, strict=True):
        if sequence.samples:
            end = first + len(sequence.token_ids)
            rows += range(end - 1 - sequence.num_drafts, end)
    return torch.tensor(rows, dtype=torch.int64)


def _merge(
    batch: StepBatch, drawn: list[SequenceOutput], told: list[list[LogprobRow]]
) -> list[SequenceOutput]:
    """drawn: of those that sample; told: of all, about their prompts."""
    remaining = iter(drawn)
    outputs = [next(remaining) if sequence.samples else SequenceOutput() for sequence in batch.sequences]
    return [
        attrs.evolve(output, prompt_logprobs=rows) if rows else output
        for output, rows in zip(outputs, told, strict=True)
    ]


def _return_memory() -> None:
    """The C library keeps what was freed for later; make it give it back, where it can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
