"""A model on the native kernels, and GGUF's blocks of random numbers."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from helpers_worker import Blocks, engine_config
from trioserve.worker.checkpoint import BLOCK_SIZES
from trioserve.worker.native_executor import NativeExecutor
from trioserve_kernels.native import available_tiers, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from helpers_worker import DrivenSequence
    from trioserve.config import ResolvedModel

TIERS = available_tiers()
"""Those that this machine can run."""


class NativeModel:
    """A native executor and its cache; to be closed."""

    def __init__(self, model: ResolvedModel, tier: str, *, num_blocks: int = 64, **args: Any) -> None:
        config = engine_config(**{"block_size": 16} | args)
        self.executor = NativeExecutor(load(tier), model, config)
        self.executor.allocate_kv_cache(num_blocks)
        self._blocks = Blocks(self.executor.layout, num_blocks)

    def new_sequence(self, prompt: list[int]) -> DrivenSequence:
        return self._blocks.new_sequence(prompt)

    def step(self, sequences: Sequence[tuple[DrivenSequence, int]]) -> list[torch.Tensor]:
        """The logits after each new token, [chunk, vocab_size] per sequence, in the order given."""
        steps = [self._blocks.schedule(sequence, size) for sequence, size in sequences]
        first_rows = self.executor.forward(steps, {})
        return [
            torch.from_numpy(self.executor.logits(range(first, first + len(step.token_ids))).copy())
            for first, step in zip(first_rows, steps, strict=True)
        ]

    def hidden_by_layer(
        self, sequence: DrivenSequence, size: int, numbers_of_layers: Iterable[int]
    ) -> list[torch.Tensor]:
        """Of one chunk, what comes out of so many layers: fp32 [size, hidden_size] each.

        The last number must be that of all layers, or later chunks find nothing in the others' cache.
        """
        batch = self.executor._batches.make([self._blocks.schedule(sequence, size)])
        found = []
        for number in numbers_of_layers:
            hidden = torch.empty(size, self.executor.config.hidden_size)
            self.executor._decoder.forward_layers(batch.step, number, hidden.data_ptr())
            found.append(hidden)
        return found

    def give_back(self, sequences: Sequence[DrivenSequence]) -> None:
        """Their blocks, to others."""
        for sequence in sequences:
            for table in sequence.block_tables:
                for block in table:
                    if block >= 0:
                        self._blocks.release(block)

    def close(self) -> None:
        self.executor.close()


def on_every_tier(model: ResolvedModel, **args: Any) -> Iterator[tuple[str, NativeModel]]:
    for tier in TIERS:
        with closing(NativeModel(model, tier, **args)) as native:
            yield tier, native


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes per row], for numbers of about 0.1 in size."""
    rng = np.random.default_rng(seed)
    if kind in {"Q8_0", "Q4_0", "Q4_1"}:
        values = rng.normal(scale=0.1, size=(rows, columns)).astype(np.float32)
        found: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return found
    numbers, size = BLOCK_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // numbers, size), np.uint8)
    scale = np.array([2e-4], np.float16).view(np.uint8)
    # The places of the blocks' scales, fp16, in llama.cpp's ggml-common.h.
    for place in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]:
        blocks[:, :, place : place + 2] = scale
    return blocks.reshape(rows, -1)


def put_in_blocks(directory: Path, kinds: dict[str, str]) -> None:
    """Replace matrices of a checkpoint: the end of a name, without `.weight` -> the kind of its blocks."""
    path = directory / "model.safetensors"
    tensors, stored = load_file(path), {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        for end, kind in kinds.items():
            if name.endswith(f"{end}.weight"):
                tensors[name] = torch.from_numpy(random_blocks(kind, *tensor.shape, seed=seed))
                stored[name] = kind
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt", **stored})
