"""The names of checkpoints' tensors, held against the models that torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers_worker import TINY_GEMMA3, TINY_LLAMA, TINY_QWEN2
from trioserve.models.checkpoint_names import tensor_names
from trioserve.models.decoder_config import decoder_config
from trioserve.models.registry import SUPPORTED, load_class

TINY = {"Gemma3ForCausalLM": TINY_GEMMA3, "LlamaForCausalLM": TINY_LLAMA, "Qwen2ForCausalLM": TINY_QWEN2}


@pytest.mark.parametrize("architecture", SUPPORTED)
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("biases", [{}, {"attention_bias": True}, {"mlp_bias": True}], ids=str)
def test_they_are_what_torch_fills(
    architecture: str, *, tie_word_embeddings: bool, biases: dict[str, Any]
) -> None:
    if biases and architecture != "LlamaForCausalLM":
        pytest.skip("others have none, or always have them")
    raw = TINY[architecture] | {"tie_word_embeddings": tie_word_embeddings} | biases
    names = list(tensor_names(decoder_config(architecture, raw)))
    assert len(names) == len(set(names))
    assert set(names) == load_class(architecture)(raw, torch.float32).weights().keys()
