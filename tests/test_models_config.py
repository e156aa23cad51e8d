"""config.json -> DecoderConfig, with clear errors; and what must not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers_worker import TINY_GEMMA3, TINY_LLAMA, TINY_QWEN2
from trioserve.errors import ModelNotSupportedError
from trioserve.models.config_gemma3 import gemma3_config
from trioserve.models.config_llama import llama_config
from trioserve.models.config_qwen2 import qwen2_config
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
    modules = [
        *(f"models.config_{family}" for family in ("gemma3", "llama", "qwen2")),
        "models.checkpoint_names",
        "models.decoder_config",
        "models.registry",
        "worker.batch",
        "worker.layer_groups",
        "worker.memory",
        "worker.model_runner",  # and what it uses where native kernels compute
    ]
    names = ", ".join(f"trioserve.{module}" for module in modules)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_old_and_new_spelling_of_the_rotary_embedding() -> None:
    old = TINY_LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    legacy = TINY_LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    new = TINY_LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    assert llama_config(old) == llama_config(new)
    assert llama_config(old).layers[0].rotary.theta == 5e5
    assert llama_config(legacy).layers[0].rotary.scaling == "linear"
    assert llama_config(legacy).layers[0].rotary.factor == 2.0


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 3.0}, LLAMA3])
def test_scaled_frequencies_are_those_of_transformers(scaling: dict[str, object]) -> None:
    raw = TINY_LLAMA | {"head_dim": 64, "rope_parameters": scaling | {"rope_theta": 10000.0}}
    config = llama_config(raw)
    expected, _ = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](LlamaConfig(**raw), "cpu")
    found = torch.from_numpy(rotary_frequencies(config.layers[0].rotary, config.head_dim))
    torch.testing.assert_close(found, expected)


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


def test_qwen2_has_windows_only_if_it_says_so() -> None:
    assert [layer.window for layer in qwen2_config(TINY_QWEN2 | {"sliding_window": 8}).layers] == [None] * 3
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    assert [layer.window for layer in qwen2_config(TINY_QWEN2 | windows).layers] == [None, None, 8]
    named = windows | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    assert [layer.window for layer in qwen2_config(TINY_QWEN2 | named).layers] == [8, None, None]


def test_gemma3_old_and_new_spelling() -> None:
    old = TINY_GEMMA3 | {
        "rope_theta": 5e5,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    full, sliding = "full_attention", "sliding_attention"
    new = TINY_GEMMA3 | {
        "layer_types": [sliding, sliding, full, sliding, sliding, full, sliding],
        "rope_parameters": {
            full: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            sliding: {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    assert gemma3_config(old) == gemma3_config(new)
    saved = Gemma3TextConfig(**new).to_dict()
    assert gemma3_config(saved) == gemma3_config(new)
    config = gemma3_config(new)
    assert [layer.window for layer in config.layers] == [10, 10, None, 10, 10, None, 10]
    assert [layer.rotary.theta for layer in config.layers[:3]] == [300.0, 300.0, 5e5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "gelu_pytorch_tanh"),
        ({"layer_types": ["full_attention"]}, "1 entries for 7 layers"),
        ({"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "yarn"),
    ],
)
def test_gemma3_refuses_what_is_not_implemented(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelNotSupportedError, match=message):
        gemma3_config(TINY_GEMMA3 | changes)


def test_an_unknown_architecture_is_refused_with_what_is_supported() -> None:
    with pytest.raises(ModelNotSupportedError, match=r"ParrotForCausalLM.*LlamaForCausalLM"):
        load_class("ParrotForCausalLM")
