"""The default model, from its package to a directory, held against transformers' own reading of the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import pytest
import torch
from tokenizers import Tokenizer

from helpers_model_sources import model_config, stored_weights, transformers_model, transformers_state
from trioserve.errors import InvalidConfigError
from trioserve.model_sources import PACKAGED_MODELS, SilentProgress, resolve_model
from trioserve.model_sources.packaged import locate_packaged

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    return resolve_model(model_config("smollm2-135m", dtype="float32"), SilentProgress())


def without_vocabulary(source: Path, target: Path) -> Path:
    """The file's tensors and numbers; transformers takes half a minute over its hundred thousand strings."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_what_it_is(model: ResolvedModel) -> None:
    assert (model.architecture, model.dtype) == ("LlamaForCausalLM", "float32")
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (49152, 8192, (2,))


def test_every_weight_is_transformers_weight(
    model: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would stay
    source = locate_packaged(PACKAGED_MODELS["smollm2-135m"], SilentProgress())
    theirs = transformers_state(without_vocabulary(source, tmp_path / "small.gguf"))
    ours = stored_weights(Path(model.directory))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_it_is_stored_in_the_files_own_blocks(model: ResolvedModel) -> None:
    assert model.blocks == ("Q4_1", "Q8_0")
    source = locate_packaged(PACKAGED_MODELS["smollm2-135m"], SilentProgress())
    stored = (Path(model.directory) / "model.safetensors").stat().st_size
    assert stored < source.stat().st_size


@pytest.mark.parametrize(
    ("dtype", "quantization", "words"),
    [
        ("auto", "auto", "bfloat16, weights in Q4_1 and Q8_0"),
        ("auto", "none", "bfloat16, weights from Q4_1 and Q8_0"),
        ("float32", "auto", "float32, weights from Q4_1 and Q8_0"),
    ],
)
def test_one_directory_for_all_precisions(
    model: ResolvedModel, dtype: str, quantization: str, words: str
) -> None:
    config = model_config("smollm2-135m", dtype=dtype, quantization=quantization)
    found = resolve_model(config, SilentProgress())
    assert (found.directory, found.precision) == (model.directory, words)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_its_blocks_are_not_quantized_again(quantization: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"auto .*none .*\(Q4_1, Q8_0\)") as error:
        resolve_model(model_config("smollm2-135m", quantization=quantization), SilentProgress())
    assert error.value.field == "quantization"


def test_the_directory_loads_in_transformers(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would stay
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    llama, report = transformers_model(Path(model.directory))
    assert not any(report.values())
    output = llama.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_tokenizer(model: ResolvedModel) -> None:
    tokenizer = Tokenizer.from_file(str(Path(model.tokenizer_directory) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("<|im_start|>user").tokens == ["<|im_start|>", "user"]
    assert tokenizer.encode("in 1234").tokens == ["in", "Ġ", "1", "2", "3", "4"]
    for text in ("Grüße, 東京 🫠🥹!", " \n\n\tdef f(x):\n    return x**2\r\n", "١٢٣ ½ ²"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
