from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers_model_sources import HEADS, KV_HEADS, GgufFile, model_config, transformers_state
from helpers_worker import PagedModel, resolved
from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources import SilentProgress, resolve_model
from trioserve.model_sources.convert_gguf import convert
from trioserve.model_sources.gguf_header import read_header
from trioserve.model_sources.safetensors_writer import to_bfloat16

if TYPE_CHECKING:
    from pathlib import Path


def converted(file: GgufFile, tmp_path: Path, dtype: Any = "float32") -> Path:
    source, target = file.write(tmp_path / "model.gguf"), tmp_path / "converted"
    target.mkdir()
    convert(source, target, dtype)
    return target


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


# The header


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = GgufFile().write(tmp_path / "model.gguf")
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert {entry.name: (entry.shape, entry.type, entry.offset) for entry in ours.tensors.values()} == {
        tensor.name: (tuple(reversed(tensor.shape.tolist())), int(tensor.tensor_type), tensor.data_offset)
        for tensor in theirs.tensors
    }


def test_every_kind_of_metadata(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    scalars = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**31, "int32": -(2**31),
        "uint64": 2**63, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True, "string": "é",
    }  # fmt: skip
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.strings", ["a", "", "日本"])
    writer.add_array("x.floats", [0.25, -1.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_header(tmp_path / "all.gguf").metadata
    assert {kind: metadata[f"x.{kind}"] for kind in scalars} == scalars
    assert (metadata["x.strings"], metadata["x.floats"]) == (["a", "", "日本"], [0.25, -1.0])


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not a GGUF file"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "byte order"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ1s", 3, 0, 1, 1, b"k", 8, 1, b"\xff"), "damaged"),
    ],
)
def test_a_damaged_header(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelSourceError, match=word) as caught:
        resolve_model(model_config(tmp_path / "bad.gguf"), SilentProgress())
    assert "bad.gguf" in str(caught.value)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.99])
def test_a_file_that_is_cut_off(tmp_path: Path, share: float) -> None:
    path = GgufFile().write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    (tmp_path / "converted").mkdir()
    with pytest.raises(ModelSourceError, match="cut off"):
        convert(path, tmp_path / "converted", "float32")


# The config


def test_config(tmp_path: Path) -> None:
    config = read_config(converted(GgufFile(), tmp_path))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"]) == (32, 48)
    assert config["num_hidden_layers"] == 2
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert (config["max_position_embeddings"], config["vocab_size"]) == (128, 300)
    assert config["rms_norm_eps"] == 1e-5  # stored as the float32 9.999999747378752e-06
    assert config["rope_theta"] == 10000.0
    assert config["tie_word_embeddings"] is False
    assert config["rope_scaling"] is None
    assert config["dtype"] == "float32"


def test_a_file_without_an_output_matrix_is_tied(tmp_path: Path) -> None:
    directory = converted(GgufFile(tied=True), tmp_path)
    assert read_config(directory)["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")


def test_token_ids_of_the_end(tmp_path: Path) -> None:
    file = GgufFile()
    tokens = file.metadata["tokenizer.ggml.tokens"]
    directory = converted(file, tmp_path)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokens.index("<|end|>"), tokens.index("<|turn|>")]
    assert generation["bos_token_id"] == tokens.index("<|turn|>")


def llama3_divisors(factor: float, *, head_dim: int = 8, theta: float = 10000.0) -> np.ndarray:
    """From transformers: its plain frequencies over its llama3 frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy().astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_again(tmp_path: Path, factor: float) -> None:
    file = GgufFile()
    file.metadata["llama.rope.freq_base"] = 500000.0
    file.tensors["rope_freqs.weight"] = llama3_divisors(factor, theta=500000.0)
    scaling = read_config(converted(file, tmp_path))["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_linear_scaling(tmp_path: Path) -> None:
    file = GgufFile()
    file.metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    scaling = read_config(converted(file, tmp_path))["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 4.0}


def _with_metadata(**changes: Any) -> GgufFile:
    file = GgufFile()
    file.metadata |= {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return file


def _with_tensor(name: str, value: np.ndarray) -> GgufFile:
    file = GgufFile()
    file.tensors[name] = value
    return file


@pytest.mark.parametrize(
    ("file", "word"),
    [
        (GgufFile(architecture="mamba"), "'mamba'.*llama"),
        (_with_metadata(expert_count=8), "mixture of experts"),
        (_with_metadata(rope__scaling__type="yarn"), "'yarn'.*linear and llama3"),
        (_with_metadata(rope__dimension_count=4), "part of each head"),
        (_with_metadata(attention__head_count_kv=[2, 1]), "one number"),
        (_with_tensor("rope_freqs.weight", np.full(4, 2.0, np.float32)), "another way than Llama 3"),
        (_with_tensor("blk.0.attn_q.bias", np.zeros(32, np.float32)), r"blk\.0\.attn_q\.bias"),
        (GgufFile(architecture="gemma2"), "'gemma2'.*gemma3, llama, qwen2"),
        (_with_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 4, 4), np.float32)), "ffn_gate_exps"),
    ],
)
def test_variants_that_are_not_supported(tmp_path: Path, file: GgufFile, word: str) -> None:
    with pytest.raises(ModelNotSupportedError, match=word):
        converted(file, tmp_path)


def test_gemma3_config(tmp_path: Path) -> None:
    file = GgufFile(architecture="gemma3", tied=True)
    file.metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = read_config(converted(file, tmp_path))
    assert (config["architectures"], config["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    assert (config["sliding_window"], config["layer_types"]) == (16, ["sliding_attention"] * 2)
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (8, 8)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (10000.0, 10000.0)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["tie_word_embeddings"] is True
    assert "final_logit_softcapping" not in config


def test_qwen2_config(tmp_path: Path) -> None:
    config = read_config(converted(GgufFile(architecture="qwen2"), tmp_path))
    assert (config["architectures"], config["model_type"]) == (["Qwen2ForCausalLM"], "qwen2")
    assert config["use_sliding_window"] is False


@pytest.mark.parametrize(
    ("architecture", "known"), [("qwen2", ["<|im_end|>", "<|endoftext|>"]), ("gemma3", ["<end_of_turn>"])]
)
def test_well_known_ends_that_the_file_does_not_name(
    architecture: str, known: list[str], tmp_path: Path
) -> None:
    file = GgufFile(architecture=architecture)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    del file.metadata["tokenizer.ggml.eot_token_id"]
    named = file.metadata["tokenizer.ggml.eos_token_id"]
    file.metadata["tokenizer.ggml.tokens"] = [*tokens, *known]
    file.metadata["tokenizer.ggml.token_type"] += [3] * len(known)
    generation = json.loads((converted(file, tmp_path) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [named, *range(len(tokens), len(tokens) + len(known))]


def test_a_missing_value(tmp_path: Path) -> None:
    file = GgufFile()
    del file.metadata["llama.context_length"]
    with pytest.raises(ModelSourceError, match=r"no llama\.context_length"):
        converted(file, tmp_path)


def test_another_architecture_is_refused_without_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = GgufFile(architecture="mamba").write(tmp_path / "mamba.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(ModelNotSupportedError, match=r"'mamba'.*llama"):
        resolve_model(model_config(path), SilentProgress())


# The weights


def test_the_weights_are_transformers_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would stay
    directory = converted(GgufFile(), tmp_path)
    ours, theirs = load_file(directory / "model.safetensors"), transformers_state(tmp_path / "model.gguf")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2"])
def test_the_weights_of_other_architectures(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would stay
    directory = converted(GgufFile(architecture=architecture, tied=True), tmp_path)
    ours, theirs = load_file(directory / "model.safetensors"), transformers_state(tmp_path / "model.gguf")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("architecture", ["gemma3", "llama", "qwen2"])
def test_the_directory_is_whole_for_transformers_and_for_us(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = converted(GgufFile(architecture=architecture), tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values())
    prompt = list(range(40))
    ours = PagedModel(resolved(directory, architecture=type(theirs).__name__))
    (logits,) = ours.step([(ours.new_sequence(prompt), 40)])
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_query_rows_are_back_in_halves(tmp_path: Path) -> None:
    """llama.cpp's converter interleaves the halves of a head's rows: 0, 4, 1, 5, ... of 8."""
    file = GgufFile()
    directory = converted(file, tmp_path)
    weights = load_file(directory / "model.safetensors")
    for heads, theirs, ours in ((HEADS, "attn_q", "q_proj"), (KV_HEADS, "attn_k", "k_proj")):
        stored = file.tensors[f"blk.0.{theirs}.weight"]
        found = weights[f"model.layers.0.self_attn.{ours}.weight"].numpy()
        for head in range(heads):
            interleaved = [head * 8 + row for row in (0, 4, 1, 5, 2, 6, 3, 7)]
            np.testing.assert_array_equal(stored[head * 8 : head * 8 + 8], found[interleaved])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_weights(tmp_path: Path, kind: str) -> None:
    """Within the error of the quantization: a wrong block layout is off by far more."""
    file = GgufFile()
    plain = file.tensors["blk.1.ffn_up.weight"]
    source, target = tmp_path / "model.gguf", tmp_path / "converted"
    file.write(source, {"blk.1.ffn_up.weight": gguf.GGMLQuantizationType[kind]})
    target.mkdir()
    convert(source, target, "float32")
    found = load_file(target / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].numpy()
    assert np.abs(found - plain).max() < 0.1 * np.abs(plain).max()


def test_bfloat16_file(tmp_path: Path) -> None:
    file = GgufFile()
    weights = load_file(converted(file, tmp_path, "bfloat16") / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    expected = torch.from_numpy(file.tensors["token_embd.weight"]).to(torch.bfloat16)
    assert torch.equal(weights["model.embed_tokens.weight"], expected)


def test_bfloat16_rounding_is_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    ties = (np.arange(0, 2**16, 7, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    found = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))
