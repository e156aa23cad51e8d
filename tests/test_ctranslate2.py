"""Whisper models in CTranslate2's layout: converted, and refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tokenizers import AddedToken

from byte_tokenizer import byte_backend
from helpers_model_sources import model_config
from trioserve.errors import InvalidConfigError, ModelNotSupportedError, ModelSourceError
from trioserve.model_sources import SilentProgress, resolve_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trioserve.config import ResolvedModel

WIDTH, INNER, MELS, FRAMES, POSITIONS = 8, 12, 4, 6, 10
NAMES = ["endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev"]
NAMES += ["nospeech", "notimestamps"]
VOCAB_SIZE = 257 + len(NAMES) + 1501
DTYPES = {np.dtype(np.float32): 0, np.dtype(np.int8): 1, np.dtype(np.int16): 2, np.dtype(np.float16): 4}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random(*shape: int) -> NDArray[np.float16]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float16)


def layer(prefix: str, *, crosses: bool) -> dict[str, NDArray[np.float16]]:
    tensors = {}
    norms = ["self_attention/layer_norm", "ffn/layer_norm", *(["attention/layer_norm"] if crosses else [])]
    for norm in norms:
        tensors |= {f"{prefix}/{norm}/gamma": random(WIDTH), f"{prefix}/{norm}/beta": random(WIDTH)}
    matrices = {
        "self_attention/linear_0": (3 * WIDTH, WIDTH),
        "self_attention/linear_1": (WIDTH, WIDTH),
        "ffn/linear_0": (INNER, WIDTH),
        "ffn/linear_1": (WIDTH, INNER),
    }
    if crosses:
        matrices |= {"attention/linear_0": (WIDTH, WIDTH), "attention/linear_1": (2 * WIDTH, WIDTH)}
        matrices["attention/linear_2"] = (WIDTH, WIDTH)
    for name, shape in matrices.items():
        tensors |= {f"{prefix}/{name}/weight": random(*shape), f"{prefix}/{name}/bias": random(shape[0])}
    return tensors


def whisper() -> dict[str, NDArray[np.generic]]:
    tensors: dict[str, NDArray[np.generic]] = {
        "decoder/num_heads": np.array(2, np.int16),
        "encoder/num_heads": np.array(2, np.int16),
        "decoder/pre_norm": np.array(1, np.int8),
        "decoder/embeddings/weight": random(VOCAB_SIZE, WIDTH),
        "decoder/position_encodings/encodings": random(POSITIONS, WIDTH),
        "encoder/position_encodings/encodings": random(FRAMES, WIDTH),
        "encoder/conv1/weight": random(WIDTH, MELS, 3),
        "encoder/conv1/bias": random(WIDTH),
        "encoder/conv2/weight": random(WIDTH, WIDTH, 3),
        "encoder/conv2/bias": random(WIDTH),
    }
    for side in ("encoder", "decoder"):
        tensors |= {f"{side}/layer_norm/gamma": random(WIDTH), f"{side}/layer_norm/beta": random(WIDTH)}
        tensors |= layer(f"{side}/layer_0", crosses=side == "decoder")
    return tensors


def save(
    directory: Path,
    tensors: dict[str, NDArray[np.generic]],
    *,
    specification: str = "WhisperSpec",
    version: int = 6,
) -> bytes:
    directory.mkdir(exist_ok=True)
    content = struct.pack("<I", version) + string(specification) + struct.pack("<II", 3, len(tensors))
    for name, values in tensors.items():
        head = struct.pack(
            f"<B{values.ndim}IBI", values.ndim, *values.shape, DTYPES[values.dtype], values.nbytes
        )
        content += string(name) + head + values.tobytes()
    content += struct.pack("<I", 0)
    (directory / "model.bin").write_bytes(content)
    config = {
        "lang_ids": [259, 260],
        "suppress_ids": [1, 2],
        "suppress_ids_begin": [220],
        "alignment_heads": [[0, 1]],
    }
    (directory / "config.json").write_text(json.dumps(config))
    backend = byte_backend()
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in NAMES])
    backend.save(str(directory / "tokenizer.json"))
    return content


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def resolve(directory: Path, **changes: str) -> ResolvedModel:
    return resolve_model(model_config(directory, **changes), SilentProgress())


def test_transformers_reads_what_a_directory_becomes(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    tensors = whisper()
    save(tmp_path / "model", tensors)
    model = resolve(tmp_path / "model")
    assert (model.architecture, model.tasks) == ("WhisperForConditionalGeneration", ("transcription",))
    assert (model.dtype, model.max_model_len, model.vocab_size) == ("float32", POSITIONS, VOCAB_SIZE)
    assert model.eos_token_ids == (257,)
    directory = Path(model.directory)
    config = transformers.WhisperConfig.from_pretrained(directory)
    loaded = transformers.WhisperForConditionalGeneration(config)
    report = loaded.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["proj_out.weight"], [])  # it is tied
    weights = loaded.state_dict()
    fused = tensors["decoder/layer_0/attention/linear_1/weight"]
    for index, name in enumerate(["k_proj", "v_proj"]):
        found = weights[f"model.decoder.layers.0.encoder_attn.{name}.weight"].numpy()
        assert (found == fused[index * WIDTH :][:WIDTH]).all()
    for name, source in [
        ("embed_positions.weight", "position_encodings/encodings"),
        ("conv1.bias", "conv1/bias"),
    ]:
        assert (weights[f"model.encoder.{name}"].numpy() == tensors[f"encoder/{source}"]).all()
    generation = transformers.GenerationConfig.from_pretrained(directory)
    assert generation.suppress_tokens == [1, 2]
    assert generation.lang_to_id == {"<|en|>": 259, "<|de|>": 260}
    assert generation.no_timestamps_token_id == 266


def test_timestamps_become_special_tokens(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    save(tmp_path / "model", whisper())
    model = resolve(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model.tokenizer_directory)
    assert tokenizer.convert_ids_to_tokens([267, 317, 267 + 1500]) == ["<|0.00|>", "<|1.00|>", "<|30.00|>"]
    assert tokenizer.decode([267, 97, 317], skip_special_tokens=True) == "a"


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    name = "encoder/layer_0/ffn/linear_0/weight"
    save(tmp_path / "model", whisper() | {name: np.zeros((INNER, WIDTH), np.int8)})
    with pytest.raises(ModelNotSupportedError, match=f"quantized.*{name} is int8.*float16"):
        resolve(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"specification": "TransformerSpec"}, ModelNotSupportedError, "TransformerSpec.*WhisperSpec"),
        ({"version": 5}, ModelSourceError, "its version is 5"),
    ],
)
def test_other_models_are_refused(
    tmp_path: Path, changes: dict[str, str], error: type[Exception], reason: str
) -> None:
    save(tmp_path / "model", whisper(), **changes)  # type: ignore[arg-type]
    with pytest.raises(error, match=reason):
        resolve(tmp_path / "model")


def test_a_tensor_that_is_lacking_is_named(tmp_path: Path) -> None:
    tensors = whisper()
    del tensors["decoder/embeddings/weight"]
    save(tmp_path / "model", tensors)
    with pytest.raises(ModelSourceError, match="no decoder/embeddings/weight"):
        resolve(tmp_path / "model")


@pytest.mark.parametrize("size", [0, 3, 100, 5_000])
def test_a_file_that_is_cut_off(tmp_path: Path, size: int) -> None:
    content = save(tmp_path / "model", whisper())
    (tmp_path / "model" / "model.bin").write_bytes(content[:size])
    with pytest.raises(ModelSourceError, match="no model file of CTranslate2"):
        resolve(tmp_path / "model")


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    save(tmp_path / "model", whisper())
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match=r"no tokenizer\.json"):
        resolve(tmp_path / "model")


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_speech_is_computed_in_float32(tmp_path: Path, changes: dict[str, str]) -> None:
    save(tmp_path / "model", whisper())
    with pytest.raises(InvalidConfigError, match="float32"):
        resolve(tmp_path / "model", **changes)
