"""Random models of every architecture, in many shapes, and what transformers says of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers

from helpers_worker import resolved, tiny_gemma3, tiny_llama, tiny_qwen2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from helpers_worker import DrivenSequence

Tiny = Callable[..., transformers.PreTrainedModel]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
WINDOWS_FROM_1 = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
TWO_ROTATIONS = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}

VARIANTS: dict[str, tuple[Tiny, dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "llama, one head per group": (tiny_llama, {"num_key_value_heads": 4}),
    "llama, one key-value head": (
        tiny_llama,
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "llama, wide heads": (tiny_llama, {"head_dim": 24}),
    "llama, tied": (tiny_llama, {"tie_word_embeddings": True}),
    "llama, biases": (tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama, linear positions": (tiny_llama, {"rope_parameters": LINEAR}),
    "llama, llama3 positions": (tiny_llama, {"rope_parameters": LLAMA3}),
    "qwen2": (tiny_qwen2, {}),
    "qwen2, tied": (tiny_qwen2, {"tie_word_embeddings": True}),
    "qwen2, windows": (tiny_qwen2, WINDOWS_FROM_1),
    "gemma3": (tiny_gemma3, {}),
    "gemma3, untied": (tiny_gemma3, {"tie_word_embeddings": False}),
    "gemma3, window of one": (tiny_gemma3, {"sliding_window": 1}),
    "gemma3, window longer than the text": (tiny_gemma3, {"sliding_window": 200}),
    "gemma3, two rotations": (tiny_gemma3, {"rope_parameters": TWO_ROTATIONS}),
    "gemma3, capped logits": (tiny_gemma3, {"final_logit_softcapping": 3.0}),
    "gemma3, windows only": (tiny_gemma3, {"layer_types": ["sliding_attention"] * 7}),
    "gemma3, biases": (tiny_gemma3, {"attention_bias": True}),
}
PROMPT = random.Random(1).choices(range(101), k=60)
CHUNKS = {"whole": [60], "chunked": [1, 3, 17, 1, 1, 20, 7, 10]}


def save(theirs: transformers.PreTrainedModel, directory: Path, **values: Any) -> Any:
    theirs.save_pretrained(directory)
    return resolved(directory, architecture=type(theirs).__name__, **values)


class Steps(Protocol):
    """What runs a model step by step."""

    def new_sequence(self, prompt: list[int]) -> DrivenSequence: ...

    def step(self, sequences: Sequence[tuple[DrivenSequence, int]]) -> list[torch.Tensor]: ...


def logits_of(paged: Steps, prompt: list[int], chunks: Sequence[int]) -> torch.Tensor:
    """[len(prompt), vocab_size]."""
    sequence = paged.new_sequence(prompt)
    return torch.cat([paged.step([(sequence, size)])[0] for size in chunks])


def expected_logits(theirs: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = theirs(torch.tensor([prompt])).logits[0]
    return logits
