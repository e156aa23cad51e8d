"""Runs a model's steps, in one thread: computes, draws, and tells of it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING, cast

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.models.registry import SPEECH
from trioserve.worker.batch import SequenceOutput
from trioserve.worker.executors import make_executor
from trioserve.worker.greedy import take_highest
from trioserve.worker.logits_processors import ProcessorContext, load_processors
from trioserve.worker.masks import GrammarMasks
from trioserve.worker.prompt_logprobs import prompt_logprobs
from trioserve.worker.sampler import Sampler
from trioserve.worker.speech_rules import SpeechRules
from trioserve.worker.speech_searches import SpeechSearches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.audio_input import AudioInput
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.sampling_params import SamplingParams
    from trioserve.worker.batch import LogprobRow, ScheduledSequence, StepBatch
    from trioserve.worker.executor import Executor
    from trioserve.worker.kv_layout import KVCacheLayout
    from trioserve.worker.lora import Adapter
    from trioserve.worker.lora_files import AdapterFile
    from trioserve.worker.masks import Masks
    from trioserve.worker.speech_searches import BeamExecutor

__all__ = ["ModelRunner"]


class ModelRunner:
    """Owns what computes (with weights and KV cache), adapters, the sampler, and a thread for grammar masks
    once there is a grammar.

    Everything but `check_params` and `read_adapter`, the constructor too, is to be called in one and the same
    thread: torch keeps its number of compute threads per calling thread. All calls block.

    Args:
      model: what to load.
      config: of it, what `make_executor` takes, `logits_processors` and the limits that those are told.

    Raises:
      ModelNotSupportedError, ModelSourceError: see `trioserve.worker.loader.load_model`.
      InvalidConfigError: see `trioserve.worker.logits_processors.load_processors`, and
        `trioserve.worker.executors.make_executor`.
    """

    def __init__(self, model: ResolvedModel, config: EngineConfig) -> None:
        self._processors = load_processors(config.logits_processors, _processor_context(model, config))
        self._executor: Executor = make_executor(model, config)
        self._decoder = self._executor.config
        self._masks = GrammarMasks(model.vocab_size)
        self._speech_rules = _speech_rules(model)
        self._sampler = Sampler(model.vocab_size, self._processors, self._speech_rules)
        self._searches = _speech_searches(self._executor, self._compute, model)
        self._max_lora_rank = 0 if config.lora is None else config.lora.max_rank
        self._adapters: dict[str, Adapter] = {}  # how many there are is for those to limit who add them

    @property
    def kernels(self) -> str:
        """What computes the model, in words."""
        return self._executor.kernels

    @property
    def layout(self) -> KVCacheLayout:
        return self._executor.layout

    @property
    def bytes_per_block(self) -> int:
        return self._executor.bytes_per_block

    def max_num_seqs(self, num_blocks: int) -> int | None:
        """See `Executor.max_num_seqs`."""
        return self._executor.max_num_seqs(num_blocks)

    def check_params(self, params: SamplingParams) -> None:
        """Ask the speech model's rules, and the custom logits processors. May be called in any thread, also
        while a step runs.

        Raises:
          InvalidRequestError: one of them refuses such a request, or fails to make up its mind about it.
        """
        if self._speech_rules is not None:
            self._speech_rules.check(params)
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
        from trioserve.worker.lora_files import read_adapter  # noqa: PLC0415 - with torch, which takes seconds

        assert self._decoder is not None, "what takes no adapters is not started for them"
        return read_adapter(Path(path), self._decoder, max_rank=self._max_lora_rank)

    def add_adapter(self, key: str, file: AdapterFile) -> None:
        """From now on, sequences may have this adapter; also while the weights are freed.

        Raises:
          ModelNotSupportedError: its values cannot be used.
        """
        from trioserve.worker.loader import TORCH_DTYPES  # noqa: PLC0415 - with torch, as above
        from trioserve.worker.lora import make_adapter  # noqa: PLC0415

        assert self._decoder is not None, "what takes no adapters is not started for them"
        self._adapters[key] = make_adapter(file, self._decoder, TORCH_DTYPES[self._executor.dtype])

    def remove_adapter(self, key: str) -> None:
        """No sequence has it any more, or none ever had."""
        self._adapters.pop(key, None)

    def align_audio(self, audio: AudioInput, token_ids: Sequence[int], num_prompt_tokens: int) -> list[float]:
        """When each token from `num_prompt_tokens` on was said, in seconds; of a speech model.

        Raises:
          ValueError: it is none, or asleep.
        """
        align = getattr(self._executor, "align", None)
        if align is None:
            raise ValueError("the model hears no audio")
        times: list[float] = align(audio, token_ids, num_prompt_tokens)
        return times

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve the cache, all zeros; memory is used as blocks are first written."""
        self._executor.allocate_kv_cache(num_blocks)

    def populate_kv_cache(self, first_block: int, end_block: int) -> None:
        """Use memory for these blocks now, if there is a cache."""
        self._executor.populate_kv_cache(first_block, end_block)

    def free_kv_cache(self) -> None:
        """Give its memory back to the system; no step can run until it is allocated anew."""
        if self._searches is not None:
            self._searches.forget_all()
        self._executor.free_kv_cache()
        _return_memory()

    def free_weights(self) -> None:
        """Give their memory back to the system; no step can run until they are loaded again."""
        self._executor.free_weights()
        _return_memory()

    def load_weights(self) -> None:
        """Read the same model again, after `free_weights`.

        Raises:
          ModelNotSupportedError, ModelSourceError: it is not what it was.
        """
        self._executor.load_weights()

    def close(self) -> None:
        """End all threads; nothing may be called afterwards, except this."""
        self._masks.close()
        self._executor.close()

    def execute(self, batch: StepBatch) -> list[SequenceOutput]:
        """Compute one step: an output for each sequence, in the batch's order.

        The grammars of its sequences are advanced by the tokens that are drawn.
        """
        return self._compute(batch) if self._searches is None else self._searches.execute(batch)

    def _compute(self, batch: StepBatch) -> list[SequenceOutput]:
        sampling = [sequence for sequence in batch.sequences if sequence.samples]
        masks = self._masks.begin(sampling)
        first_rows = self._executor.forward(batch.sequences, self._adapters)
        told = prompt_logprobs(batch.sequences, first_rows, self._executor.logits)
        drawn = self._draw(sampling, _sampled_rows(batch, first_rows), masks) if sampling else []
        return _merge(batch, drawn, told)

    def _draw(
        self, sampling: Sequence[ScheduledSequence], rows: Sequence[int], masks: Callable[[], Masks]
    ) -> list[SequenceOutput]:
        """rows: of the step, 1 + num_drafts per sequence."""
        if self._sampler.needs_logits(sampling):
            return self._sampler.sample(self._executor.logits(rows), sampling, masks())
        return take_highest(self._executor.highest(rows), sampling)


def _speech_rules(model: ResolvedModel) -> SpeechRules | None:
    return SpeechRules.from_directory(Path(model.directory)) if model.architecture in SPEECH else None


def _speech_searches(
    executor: Executor, compute: Callable[[StepBatch], list[SequenceOutput]], model: ResolvedModel
) -> SpeechSearches | None:
    if model.architecture not in SPEECH:
        return None
    return SpeechSearches(cast("BeamExecutor", executor), compute, model.max_model_len)


def _processor_context(model: ResolvedModel, config: EngineConfig) -> ProcessorContext:
    return ProcessorContext(
        vocab_size=model.vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
    )


def _sampled_rows(batch: StepBatch, first_rows: list[int]) -> list[int]:
    """The rows of each sampling sequence's last known token and of its drafts, in the batch's order."""
    rows: list[int] = []
    for first, sequence in zip(first_rows, batch.sequences, strict=True):
        if sequence.samples:
            end = first + len(sequence.token_ids)
            rows += range(end - 1 - sequence.num_drafts, end)
    return rows


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
