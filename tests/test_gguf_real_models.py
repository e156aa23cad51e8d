"""The packaged Gemma 3 and Qwen2.5-Coder, quantized as Q4_K_M: what they are, and their tokenizers.

Their greedy text is looked at in `test_greedy_equality.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from helpers_model_sources import packaged_model

NAMES = ["gemma3-270m", "qwen2.5-coder-0.5b"]
# By transformers 5.24 from the same files; it needs some twenty seconds for each.
RECORDED = json.loads((Path(__file__).parent / "data" / "gguf_token_ids.json").read_text(encoding="utf-8"))


def test_what_they_are() -> None:
    gemma, qwen = map(packaged_model, NAMES)
    assert (gemma.architecture, gemma.vocab_size, gemma.context_length) == (
        "Gemma3ForCausalLM",
        262144,
        32768,
    )
    assert (qwen.architecture, qwen.vocab_size, qwen.context_length) == ("Qwen2ForCausalLM", 151936, 32768)
    assert gemma.eos_token_ids == (1, 106)  # <eos>, <end_of_turn>
    assert qwen.eos_token_ids == (151645, 151643)  # <|im_end|>, <|endoftext|>


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_are_those_that_transformers_recorded(name: str) -> None:
    directory = packaged_model(name).tokenizer_directory
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    for row in RECORDED[name]:
        assert tokenizer.encode(row["text"]).ids == row["ids"], row["text"]


def test_only_the_instructed_one_has_a_chat_template() -> None:
    gemma, qwen = (
        json.loads((Path(packaged_model(name).tokenizer_directory) / "tokenizer_config.json").read_text())
        for name in NAMES
    )
    assert "chat_template" not in gemma
    assert "<tool_call>" in qwen["chat_template"]
