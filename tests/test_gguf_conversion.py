from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from helpers_model_sources import (
    HEADS,
    KV_HEADS,
    GgufFile,
    model_config,
    stored_weights,
    transformers_state,
)
from helpers_worker import PagedModel, resolved
from trioserve.errors import InvalidConfigError, ModelNotSupportedError, ModelSourceError
from trioserve.model_sources import SilentProgress, TerminalProgress, resolve_model
from trioserve.model_sources.convert_gguf import convert
from trioserve.model_sources.gguf_header import TensorEntry, read_header
from trioserve.model_sources.gguf_weights import GgufWeights
from trioserve.model_sources.safetensors_writer import to_bfloat16


def converted(
    file: GgufFile, tmp_path: Path, quantized: dict[str, gguf.GGMLQuantizationType] | None = None
) -> Path:
    source, target = file.write(tmp_path / "model.gguf", quantized), tmp_path / "converted"
    target.mkdir()
    convert(source, target)
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
        convert(path, tmp_path / "converted")


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
    assert (config["dtype"], config["gguf_types"]) == ("bfloat16", {"F32": 16})


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
    theirs, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
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


UP = ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight")


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """uint8 [rows, bytes]: any bytes mean something, but that each fp16 scale must be a finite number."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    random = np.random.default_rng(3)
    data = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    scales = random.uniform(-0.01, 0.01, (rows, blocks, 2)).astype(np.float16).view(np.uint8)
    at = {"Q6_K": slice(208, 210), "Q4_K": slice(0, 4), "Q4_1": slice(0, 4), "Q5_1": slice(0, 4)}
    place = at.get(kind, slice(0, 2))
    data[:, :, place] = scales[:, :, : place.stop - place.start]
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_blocks_that_can_be_served_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    file = GgufFile()
    source, stored = UP
    blocks = file.tensors[source] = random_blocks(kind, rows=48, blocks=3)
    directory = converted(file, tmp_path, {source: gguf.GGMLQuantizationType[kind]})
    with safe_open(directory / "model.safetensors", framework="numpy") as weights:
        np.testing.assert_array_equal(weights.get_tensor(stored), blocks)
        assert weights.metadata()[stored] == kind
        assert weights.metadata().keys() - {"format"} == {stored}
    assert read_config(directory)["gguf_types"] == {"F32": 15, kind: 1}


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_rows_of_blocks_change_places_whole(tmp_path: Path, name: str) -> None:
    source = f"blk.0.attn_{name[0]}.weight"
    kind = gguf.GGMLQuantizationType.Q4_1
    stored = stored_weights(converted(GgufFile(), tmp_path, {source: kind}))
    (tmp_path / "plain").mkdir()
    exact = stored_weights(converted(GgufFile(), tmp_path / "plain"))
    weight = f"model.layers.0.self_attn.{name}.weight"
    expected = gguf.quants.dequantize(gguf.quants.quantize(exact[weight].numpy(), kind), kind)
    np.testing.assert_array_equal(stored[weight].numpy(), expected)


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "IQ4_NL"])
def test_other_quantizations_are_rounded_and_named(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = GgufFile()
    source, stored = UP
    blocks = file.tensors[source] = random_blocks(kind, rows=48, blocks=3)
    path = file.write(tmp_path / "model.gguf", {source: gguf.GGMLQuantizationType[kind]})
    model = resolve_model(model_config(path), TerminalProgress())
    assert f"matrices that it has in {kind} were rounded to bfloat16" in capsys.readouterr().err
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    found = load_file(Path(model.directory) / "model.safetensors")[stored]
    assert torch.equal(found, expected.to(torch.bfloat16))
    assert (model.blocks, model.precision) == ((), "bfloat16")
    with pytest.raises(InvalidConfigError, match=rf"quantized already \({kind}\), got 'int8'"):
        resolve_model(model_config(path, quantization="int8"), SilentProgress())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_plain_matrices_stay_as_they_are(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    file = GgufFile()
    matrices = [name for name, tensor in file.tensors.items() if tensor.ndim > 1]
    directory = converted(file, tmp_path, dict.fromkeys(matrices, gguf.GGMLQuantizationType[kind]))
    weights = load_file(directory / "model.safetensors")
    expected = torch.from_numpy(file.tensors[UP[0]]).to(dtype)
    assert torch.equal(weights[UP[1]], expected)
    assert {tensor.dtype for tensor in weights.values() if tensor.ndim > 1} == {dtype}
    model = resolve_model(model_config(directory, quantization="int8"), SilentProgress())
    assert (model.dtype, model.precision) == ("bfloat16", "bfloat16, weights in int8")


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_vectors_are_float32(tmp_path: Path, kind: str) -> None:
    """Gemma's norms, which the converter adds 1 to, lose nothing when that is taken back."""
    file = GgufFile(architecture="gemma3")
    name = "blk.0.attn_norm.weight"
    file.tensors[name] = file.tensors[name] + 1
    weights = load_file(
        converted(file, tmp_path, {name: gguf.GGMLQuantizationType[kind]}) / "model.safetensors"
    )
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    expected = torch.from_numpy(file.tensors[name]).to(dtype).float() - 1
    assert torch.equal(weights["model.layers.0.input_layernorm.weight"], expected)


@pytest.mark.parametrize(
    ("entry", "error", "word"),
    [
        (TensorEntry("x", (2, 33), 8, 0), ModelSourceError, r"x have 33 elements.*32 \(Q8_0\)"),
        (TensorEntry("x", (2, 32), 99, 0), ModelNotSupportedError, "x is quantized as 99"),
        (TensorEntry("x", (2, 32), 8, 40), ModelSourceError, "cut off: the tensor x"),
    ],
)
def test_tensors_that_cannot_be(
    tmp_path: Path, entry: TensorEntry, error: type[Exception], word: str
) -> None:
    (tmp_path / "data").write_bytes(bytes(100))
    with pytest.raises(error, match=word):
        GgufWeights(tmp_path / "data").load(entry)


def test_bfloat16_rounding_is_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    ties = (np.arange(0, 2**16, 7, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    found = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))
