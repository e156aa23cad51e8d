"""What the worker's and the models' tests share: tiny checkpoints, and sequences to run through them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import attrs
import torch
import transformers

from trioserve.args import EngineArgs
from trioserve.config import GenerationDefaults, ResolvedModel
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import TokenConstraints
from trioserve.worker.attention import TorchAttention
from trioserve.worker.batch import ScheduledSequence, SequenceOutput, StepBatch
from trioserve.worker.loader import load_model
from trioserve.worker.lora import step_adapters

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trioserve.config import DType, EngineConfig
    from trioserve.worker.kv_layout import KVCacheLayout
    from trioserve.worker.lora import Adapter
    from trioserve.worker.model_runner import ModelRunner

# For matrices as small as these, waiting for each other takes threads longer than the work.
torch.set_num_threads(1)
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


TINY_QWEN2 = TINY_LLAMA | {"num_hidden_layers": 3}
TINY_GEMMA3 = TINY_LLAMA | {
    "num_hidden_layers": 7,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 10,
    "sliding_window_pattern": 3,
}
"""Five layers see 10 tokens back, two see everything."""


def tiny_llama(**changes: object) -> transformers.PreTrainedModel:
    """A random model of transformers, the same one for the same arguments; biases and norms random too."""
    return _random(transformers.LlamaForCausalLM, transformers.LlamaConfig(**TINY_LLAMA | changes))


def tiny_qwen2(**changes: object) -> transformers.PreTrainedModel:
    return _random(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**TINY_QWEN2 | changes))


def tiny_gemma3(**changes: object) -> transformers.PreTrainedModel:
    return _random(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**TINY_GEMMA3 | changes))


def _random(
    model_class: type[transformers.PreTrainedModel], config: transformers.PreTrainedConfig
) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(-0.5, 0.5).add_(0.0 if config.model_type == "gemma3_text" else 1.0)
    return model


def resolved(
    directory: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    dtype: DType = "float32",
    max_model_len: int = 128,
) -> ResolvedModel:
    return ResolvedModel(
        directory=str(directory),
        tokenizer_directory=str(directory),
        architecture=architecture,
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
    blocks: list[int] = attrs.Factory(list)
    """Of a model with one group of layers."""
    block_tables: list[list[int]] = attrs.Factory(lambda self: [self.blocks], takes_self=True)
    params: SamplingParams = GREEDY
    seed: int = 0
    lora: str | None = None
    output: list[int] = attrs.Factory(list)
    start: int = 0

    def next_chunk(self, size: int) -> ScheduledSequence:
        known = self.prompt + self.output
        chunk = known[self.start : self.start + size]
        scheduled = scheduled_sequence(
            start=self.start,
            token_ids=chunk,
            block_tables=self.block_tables,
            samples=self.start + len(chunk) == len(known),
            params=self.params,
            seed=self.seed,
            lora=self.lora,
            prompt_token_ids=self.prompt,
            output_token_ids=list(self.output),
        )
        self.start += len(chunk)
        return scheduled


def scheduled_sequence(**fields: Any) -> ScheduledSequence:
    """A sequence of one token that is drawn greedily; `fields` say what is different about it."""
    defaults: dict[str, Any] = {
        "request_id": 0,
        "start": 0,
        "token_ids": [0],
        "block_tables": [[0]],
        "samples": True,
        "params": GREEDY,
        "constraints": TokenConstraints(),
        "seed": 0,
        "prompt_token_ids": [0],
        "output_token_ids": [],
        "stop_token_ids": frozenset({2}),
    }
    values = defaults | fields
    values.setdefault("prompt_logprobs_start", len(values["prompt_token_ids"]))
    return ScheduledSequence(**values)


def run_step(runner: ModelRunner, sequences: Sequence[tuple[DrivenSequence, int]]) -> list[SequenceOutput]:
    """One step over (sequence, chunk size) pairs; drawn tokens are added to their sequences."""
    scheduled = [sequence.next_chunk(size) for sequence, size in sequences]
    outputs = runner.execute(StepBatch(scheduled))
    for (sequence, _), output in zip(sequences, outputs, strict=True):
        sequence.output += [token.token_id for token in output.tokens]
    return outputs


class Blocks:
    """A scheduler's care for the blocks of a pool: those that a window has left are handed on.

    Every table entry that nothing may read is -1.
    """

    def __init__(self, layout: KVCacheLayout, num_blocks: int) -> None:
        self._layout = layout
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)

    def new_sequence(self, prompt: list[int]) -> DrivenSequence:
        return DrivenSequence(prompt=prompt, block_tables=[[] for _ in self._layout.windows])

    def schedule(self, sequence: DrivenSequence, size: int) -> ScheduledSequence:
        """Its next chunk, with all the blocks that it needs."""
        self._hold(sequence, size)
        return sequence.next_chunk(size)

    def _hold(self, sequence: DrivenSequence, size: int) -> None:
        layout = self._layout
        known = len(sequence.prompt) + len(sequence.output)
        end = min(sequence.start + size, known)
        for group, table in enumerate(sequence.block_tables):
            for block in range(layout.first_needed_block(group, sequence.start)):
                if table[block] >= 0:
                    self.release(table[block])
                    table[block] = -1
            while len(table) * layout.block_size < end:
                table.append(self.take())

    def take(self) -> int:
        return self._free.pop(0)

    def release(self, block: int) -> None:
        self._free.append(block)


class PoisonedBlocks(Blocks):
    """Of a torch cache: every block that nobody holds is filled with NaN, and a fresh one with numbers that
    would be noticed."""

    def __init__(self, layout: KVCacheLayout, caches: list[torch.Tensor]) -> None:
        super().__init__(layout, caches[0].shape[1])
        self._caches = caches
        for cache in caches:
            cache.fill_(torch.nan)

    def take(self) -> int:
        block = super().take()
        for cache in self._caches:
            cache[:, block] = 1e4
        return block

    def release(self, block: int) -> None:
        for cache in self._caches:
            cache[:, block] = torch.nan
        super().release(block)


class PagedModel:
    """A torch model and its cache, whose blocks are poisoned."""

    def __init__(self, model: ResolvedModel, *, num_blocks: int = 100, block_size: int = BLOCK_SIZE) -> None:
        self.model = load_model(model)
        self.backend = TorchAttention(self.model.config, block_size, self.model.dtype)
        self.adapters: dict[str, Adapter] = {}
        self._caches = self.backend.allocate(num_blocks)
        self._blocks = PoisonedBlocks(self.backend.layout, self._caches)

    def new_sequence(self, prompt: list[int]) -> DrivenSequence:
        return self._blocks.new_sequence(prompt)

    @torch.inference_mode()
    def step(self, sequences: Sequence[tuple[DrivenSequence, int]]) -> list[torch.Tensor]:
        """The logits after each new token, [chunk, vocab_size] per sequence, in the order given."""
        steps = [self._blocks.schedule(sequence, size) for sequence, size in sequences]
        order = self.backend.arrange(steps)
        arranged = [steps[index] for index in order]
        token_ids = torch.tensor([token for step in arranged for token in step.token_ids])
        positions = torch.tensor([step.start + i for step in arranged for i in range(len(step.token_ids))])
        plan = self.backend.plan(arranged)
        adapters = step_adapters(arranged, self.adapters)
        hidden = self.model.forward(token_ids, positions, plan, self._caches, adapters)
        parts = self.model.logits(hidden).split([len(step.token_ids) for step in arranged])
        return [parts[order.index(index)] for index in range(len(steps))]

    def greedy(self, sequences: Sequence[tuple[DrivenSequence, int]]) -> None:
        """A step; the sequences whose last known token it reaches get their most likely next one."""
        for (sequence, _), logits in zip(sequences, self.step(sequences), strict=True):
            if sequence.start == len(sequence.prompt) + len(sequence.output):
                sequence.output.append(int(logits[-1].argmax()))
