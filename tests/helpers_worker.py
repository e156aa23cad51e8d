"""What the worker's and the models' tests share: tiny checkpoints, and sequences to run through them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
import transformers

from trioserve.args import EngineArgs
from trioserve.config import GenerationDefaults, ResolvedModel
from trioserve.sampling_params import SamplingParams
from trioserve.worker.batch import SampledToken, ScheduledSequence, StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trioserve.config import DType, EngineConfig
    from trioserve.worker.model_runner import ModelRunner

# Its bar starts a thread, which would stay.
transformers.utils.logging.disable_progress_bar()

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_llama(**changes: object) -> transformers.LlamaForCausalLM:
    """A random model of transformers, the same one for the same arguments; biases and norms random too."""
    config = transformers.LlamaConfig(**TINY_LLAMA | changes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def resolved(directory: Path, *, dtype: DType = "float32", max_model_len: int = 128) -> ResolvedModel:
    return ResolvedModel(
        directory=str(directory),
        tokenizer_directory=str(directory),
        architecture="LlamaForCausalLM",
        dtype=dtype,
        vocab_size=TINY_LLAMA["vocab_size"],
        context_length=128,
        max_model_len=max_model_len,
        eos_token_ids=(2,),
        generation=GenerationDefaults(),
    )


def engine_config(**args: Any) -> EngineConfig:
    return EngineArgs(**{"threads": 1, "block_size": BLOCK_SIZE} | args).create_engine_config()


@attrs.define(kw_only=True)
class DrivenSequence:
    """One sequence as a scheduler would drive it."""

    prompt: list[int]
    blocks: list[int]
    params: SamplingParams = GREEDY
    seed: int = 0
    output: list[int] = attrs.Factory(list)
    start: int = 0

    def next_chunk(self, size: int) -> ScheduledSequence:
        known = self.prompt + self.output
        chunk = known[self.start : self.start + size]
        scheduled = scheduled_sequence(
            start=self.start,
            token_ids=chunk,
            block_table=self.blocks,
            samples=self.start + len(chunk) == len(known),
            params=self.params,
            seed=self.seed,
            prompt_token_ids=self.prompt,
            output_token_ids=list(self.output),
        )
        self.start += len(chunk)
        return scheduled


def scheduled_sequence(**fields: Any) -> ScheduledSequence:
    defaults: dict[str, Any] = {
        "request_id": 0,
        "start": 0,
        "token_ids": [0],
        "block_table": [0],
        "samples": True,
        "params": GREEDY,
        "seed": 0,
        "prompt_token_ids": [0],
        "output_token_ids": [],
        "stop_token_ids": frozenset({2}),
    }
    return ScheduledSequence(**defaults | fields)


def run_step(runner: ModelRunner, sequences: Sequence[tuple[DrivenSequence, int]]) -> list[SampledToken]:
    """One step over (sequence, chunk size) pairs; drawn tokens are added to their sequences."""
    scheduled = [sequence.next_chunk(size) for sequence, size in sequences]
    tokens = runner.execute(StepBatch(scheduled))
    drawing = [s for (s, _), step in zip(sequences, scheduled, strict=True) if step.samples]
    for sequence, token in zip(drawing, tokens, strict=True):
        sequence.output.append(token.token_id)
    return tokens
