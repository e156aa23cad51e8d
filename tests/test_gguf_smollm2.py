"""The default model, from its package to a directory, held against transformers' own reading of the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from helpers_model_sources import model_config, transformers_state
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
    ours = load_file(Path(model.directory) / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_bfloat16_is_the_rounded_float32(model: ResolvedModel) -> None:
    exact = load_file(Path(model.directory) / "model.safetensors")
    found = resolve_model(model_config("smollm2-135m"), SilentProgress())
    assert found.dtype == "bfloat16"
    for name, tensor in load_file(Path(found.directory) / "model.safetensors").items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name


def test_the_directory_loads_in_transformers(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would stay
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    llama = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    output = llama.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_tokenizer(model: ResolvedModel) -> None:
    tokenizer = Tokenizer.from_file(str(Path(model.tokenizer_directory) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("<|im_start|>user").tokens == ["<|im_start|>", "user"]
    assert tokenizer.encode("in 1234").tokens == ["in", "Ġ", "1", "2", "3", "4"]
    for text in ("Grüße, 東京 🫠🥹!", " \n\n\tdef f(x):\n    return x**2\r\n", "١٢٣ ½ ²"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
