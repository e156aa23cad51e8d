"""The native decoder against the torch models, layer by layer, on every tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

from helpers_decoders import PROMPT, WINDOWS_FROM_1, Tiny, save
from helpers_model_sources import packaged_model
from helpers_native import TIERS, on_every_tier
from helpers_worker import PagedModel, tiny_gemma3, tiny_llama, tiny_qwen2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from helpers_native import NativeModel
    from trioserve.config import ResolvedModel

pytestmark = pytest.mark.skipif(not TIERS, reason="no native kernels were built")

CHUNKS = [33, 1, 7, 19]
MODELS: dict[str, tuple[Tiny, dict[str, Any]]] = {
    "llama": (tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama, heads of 80": (tiny_llama, {"hidden_size": 80, "head_dim": 80, "intermediate_size": 100}),
    "qwen2": (tiny_qwen2, WINDOWS_FROM_1 | {"hidden_size": 128, "intermediate_size": 96}),
    "gemma3": (tiny_gemma3, {"head_dim": 256, "num_key_value_heads": 1}),
}

FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 1.5
"""Times the error that torch itself makes in bfloat16: what is rounded where is not the same in both."""


def _layers_of_torch(
    model: ResolvedModel, prompt: list[int], numbers_of_layers: Iterable[int]
) -> list[torch.Tensor]:
    """What comes out of so many layers: [tokens, hidden_size] each."""
    paged = PagedModel(model)
    kept: list[torch.Tensor] = []

    def recording(block: Any) -> Any:
        def call(x: torch.Tensor, *others: Any) -> torch.Tensor:
            if not kept:
                kept.append(x)
            kept.append(block(x, *others))
            return kept[-1]

        return call

    # The model's own blocks, as it calls them itself.
    decoder: Any = paged.model
    decoder._blocks = [recording(block) for block in decoder._blocks]
    paged.step([(paged.new_sequence(prompt), len(prompt))])
    return [kept[number].float() for number in numbers_of_layers]


def _layers_of(
    native: NativeModel, prompt: list[int], numbers_of_layers: Sequence[int]
) -> list[torch.Tensor]:
    """The same, in chunks."""
    sequence = native.new_sequence(prompt)
    chunks = [native.hidden_by_layer(sequence, size, numbers_of_layers) for size in CHUNKS]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the worst token, in parts of its length."""
    lengths = expected.norm(dim=1).clamp_min(1e-6)  # a padding token's is 0
    return float(((found - expected).norm(dim=1) / lengths).max())


def _check_layers(model: ResolvedModel, prompt: list[int], numbers_of_layers: Sequence[int]) -> None:
    """In both dtypes: against torch in float32."""
    in_float32 = attrs.evolve(model, dtype="float32")
    expected = _layers_of_torch(in_float32, prompt, numbers_of_layers)
    for tier, native in on_every_tier(in_float32):
        ours = _layers_of(native, prompt, numbers_of_layers)
        for number, found, right in zip(numbers_of_layers, ours, expected, strict=True):
            assert _error(found, right) < FLOAT32_TOLERANCE, (tier, number)
    in_bfloat16 = attrs.evolve(model, dtype="bfloat16", quantization="none")
    theirs = _layers_of_torch(in_bfloat16, prompt, numbers_of_layers)
    for tier, native in on_every_tier(in_bfloat16):
        ours = _layers_of(native, prompt, numbers_of_layers)
        for number, found, other, right in zip(numbers_of_layers, ours, theirs, expected, strict=True):
            assert _error(found, right) <= BFLOAT16_TOLERANCE * _error(other, right), (tier, number)


@pytest.mark.parametrize(("tiny", "changes"), MODELS.values(), ids=MODELS)
def test_every_layer_of_a_random_model(tiny: Tiny, changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = tiny(**changes).bfloat16().float()
    model = save(theirs, tmp_path)
    _check_layers(model, PROMPT, range(theirs.config.num_hidden_layers + 1))


def test_layers_of_a_real_model() -> None:
    model = packaged_model("smollm2-135m")
    prompt = list(range(1000, 1000 + sum(CHUNKS)))
    _check_layers(model, prompt, [0, 1, 2, 10, 30])
