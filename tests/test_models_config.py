"""config.json -> DecoderConfig, with clear errors; and what must not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers_worker import TINY_LLAMA
from trioserve.errors import ModelNotSupportedError
from trioserve.models.config import llama_config
from trioserve.models.registry import load_class
from trioserve.models.rotary import rotary_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_what_is_read_before_torch_does_not_import_it() -> None:
    modules = "models.config, trioserve.models.registry, trioserve.worker.batch, trioserve.worker.memory"
    code = f"import sys, trioserve.{modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_old_and_new_spelling_of_the_rotary_embedding() -> None:
    old = TINY_LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    legacy = TINY_LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    new = TINY_LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    assert llama_config(old) == llama_config(new)
    assert llama_config(old).rotary.theta == 5e5
    assert llama_config(legacy).rotary.scaling == "linear"
    assert llama_config(legacy).rotary.factor == 2.0


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 3.0}, LLAMA3])
def test_scaled_frequencies_are_those_of_transformers(scaling: dict[str, object]) -> None:
    raw = TINY_LLAMA | {"head_dim": 64, "rope_parameters": scaling | {"rope_theta": 10000.0}}
    config = llama_config(raw)
    expected, _ = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](LlamaConfig(**raw), "cpu")
    torch.testing.assert_close(rotary_frequencies(config.rotary, config.head_dim), expected)


def test_every_wrong_key_is_named() -> None:
    raw = TINY_LLAMA | {"hidden_size": "big", "tie_word_embeddings": 1, "hidden_act": "gelu"}
    del raw["vocab_size"]
    with pytest.raises(ModelNotSupportedError) as caught:
        llama_config(raw)
    for part in ("hidden_size", "'big'", "tie_word_embeddings", "hidden_act", "vocab_size is required"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be above 0"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"hidden_size": 30}, "head_dim is missing"),
        ({"head_dim": 7}, "must be even"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "0.5"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelNotSupportedError, match=message):
        llama_config(TINY_LLAMA | changes)


def test_an_unknown_architecture_is_refused_with_what_is_supported() -> None:
    with pytest.raises(ModelNotSupportedError, match=r"ParrotForCausalLM.*LlamaForCausalLM"):
        load_class("ParrotForCausalLM")
